"""Plans of samples of which only the lengths matter."""

from collections.abc import Sequence

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef
from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.packing import PackingPlan, plan_step


def plan_of_lengths(lengths: Sequence[int], *, group_size: int = 3, ranks: int = 1, budget: int = 1000) -> PackingPlan:
    """Every token is trained."""
    refs = [
        SampleRef(
            store="",
            sample_id=0,
            group_id=index // group_size,
            sample=index % group_size,
            length=length,
            trained_tokens=length,
            reward=0.0,
            oldest_version=0,
            location="",
            offset=0,
            checksum=0,
            advantage=0.0,
        )
        for index, length in enumerate(lengths)
    ]
    return plan_step(SampleBatch.of(refs), TrainerConfig(data_parallel=ranks, max_tokens_per_microbatch=budget))
