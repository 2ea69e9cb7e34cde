"""The world of torch.distributed that the ranks of one mesh make, on one host and without a port.

They meet over a file. torch's usual store is a TCP server of rank 0 that listens on every interface and asks nobody who
they are.
"""

from __future__ import annotations

import os

RENDEZVOUS = "TITAN_RL_RENDEZVOUS"
"""Variable with the path of the file where the ranks of a mesh meet: a new one each time, in a private directory."""


def join_world(backend: str) -> None:
    """Bring the default process group up, if it is not. RANK, WORLD_SIZE and, for more than one rank, RENDEZVOUS must
    be in the environment."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.HashStore() if ranks == 1 else dist.FileStore(os.environ[RENDEZVOUS], ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
