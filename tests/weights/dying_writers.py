"""Program of test_dying_writers.py: two ranks, of which the second one kills itself in the middle.

Torch is imported once and the ranks are forked, which keeps this quick.
"""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rank_scenarios import die_publishing, publish_first


def run(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    publisher, first = publish_first(rank, directory)
    (directory / f"v1.{rank}.pickle").write_bytes(pickle.dumps(first))
    result = die_publishing(publisher, rank)
    (directory / f"result.{rank}.pickle").write_bytes(pickle.dumps(result))


def main() -> None:
    scratch = Path(sys.argv[1])
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            run(rank, scratch)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    (scratch / "statuses.pickle").write_bytes(pickle.dumps(statuses))


if __name__ == "__main__":
    main()
