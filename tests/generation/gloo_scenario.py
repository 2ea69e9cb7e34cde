"""What each rank does in test_gloo_channel."""

from __future__ import annotations

import os

import torch.distributed as dist
from generation_examples import make_publication, make_request

from titan_rl.generation.decisions import LoopAction, LoopDecision
from titan_rl.generation.gloo_channel import GlooChannel
from titan_rl.processes import join_world


def decisions() -> list[LoopDecision]:
    few = tuple(make_request(f"a{index}", seed=index) for index in range(2))
    many = tuple(make_request(f"b{index}", prompt=range(12), seed=2**62 + index) for index in range(300))
    return [
        LoopDecision(sequence=0, action=LoopAction.IDLE, digest=2**64 - 1),
        LoopDecision(sequence=1, action=LoopAction.PULL_MODEL_STATE_DICT, publication=make_publication(3)),
        LoopDecision(sequence=2, action=LoopAction.STEP, admit=few, abort=("x",), burst_steps=4),
        LoopDecision(sequence=3, action=LoopAction.STEP, admit=many),
        LoopDecision(sequence=4, action=LoopAction.STEP, abort=tuple(f"request-{index}" for index in range(999))),
        LoopDecision(sequence=5, action=LoopAction.CLOSE),
    ]


def exchange() -> tuple[list[LoopDecision], list[list[str]]]:
    rank = int(os.environ["RANK"])
    join_world("gloo")
    channel = GlooChannel()
    channel.open()
    received = []
    for decision in decisions():
        if rank == 0:
            channel.send(decision)
            received.append(decision)
        else:
            received.append(channel.receive())
    failures = [
        channel.gather_failures(""),
        channel.gather_failures("" if rank == 0 else "rank 1 has no space: ü" * 200),
    ]
    channel.close()
    dist.destroy_process_group()
    return received, failures
