"""Config of the data plane: where finished samples wait and how trainer ranks get them."""

from dataclasses import dataclass

from titan_rl.bounds import Count


@dataclass(kw_only=True, slots=True)
class DataPlaneConfig:
    """Samples stay in the rollout worker that made them until they are trained."""

    store_mib: Count = 1024
    """Shared memory that one rollout worker may fill with samples; about 60 thousand tokens per MiB. A run whose
    samples do not fit ends with an error that says so."""
