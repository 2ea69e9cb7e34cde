#!/usr/bin/env python
"""Tries every GPU path of titan_rl that this machine allows, one by one, and says what came of each.

    .venv/bin/python scripts/gpu_check.py [--only NAME …] [--seconds 600] [--device cuda]

Each check has processes of its own and a time limit. The output is a table, then one line of JSON. `--device cpu` runs
every check on the CPU: a test of this script, not of a GPU.

Exit codes: 0 all that could be tried works · 1 something failed or differs too much · 3 nothing could be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

DOCUMENTS = [[2 + (7 * index + 5 * at * at) % 11 for at in range(8 + 11 * index % 40)] for index in range(24)]
"""Token ids of many lengths."""

FLOAT32_TOLERANCE = 1e-4
"""Of logprobs, and of weights after a step at learning rate 1e-3: only the order of sums is another one."""
BFLOAT16_TOLERANCE = 0.05
"""Of a logprob (nats) against float32: the mean at which `trainer.logprob_alarm` warns."""


class Finding(NamedTuple):
    verdict: str  # works, differs, failed or not tried
    detail: str
    seconds: float = 0.0


def compared(what: str, ours: list[float], reference: list[float], tolerance: float) -> Finding:
    difference = max(abs(a - b) for a, b in zip(ours, reference, strict=True))
    detail = f"{what} differ by {difference:.2g} from the CPU's (at most {tolerance:.2g})"
    return Finding("works" if difference <= tolerance else "differs", detail)


# -- what is computed on both sides, in processes of its own: each computes on one device --


def tiny_model() -> str:
    from titan_rl.policy.config import TinyPolicyConfig
    from titan_rl.policy.models.tiny import make_tiny_policy

    return str(make_tiny_policy(TinyPolicyConfig()))


def updater(device: str, **settings: Any) -> Any:
    from titan_rl.policy.config import OptimizerConfig, TrainerConfig
    from titan_rl.policy.updater import PolicyUpdater

    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_microbatch=256, **settings)
    return PolicyUpdater(config, model_path=Path(tiny_model()), temperature=1.0, total_steps=9, device=device, seed=0)


def batch_of(rows: list[list[int]], trained_share: float = 0.5) -> Any:
    """A document per row, this share of it trained, from its end."""
    import numpy as np

    from titan_rl.data_plane.sample_batch import SampleBatch
    from titan_rl.types import NO_VERSION, TrainingSample

    def document(index: int, row: list[int]) -> TrainingSample:
        mask = np.arange(len(row)) >= max(1, len(row) - int(trained_share * len(row)))
        logprobs, versions = np.where(mask, -2.5 + 0.1 * (index % 5), 0.0), np.where(mask, 1, NO_VERSION)
        arrays = {"logprobs": logprobs.astype(np.float32), "versions": versions.astype(np.int64), "loss_mask": mask}
        numbers = {"group_id": index, "sample": 0, "advantage": 1.0 - 0.3 * (index % 7), "reward": 0.0}
        return TrainingSample(token_ids=np.array(row, np.int32), **arrays, **numbers)

    return SampleBatch.of(document(index, row) for index, row in enumerate(rows))


def logprobs(device: str, dtype: str, documents: str) -> list[list[float]]:
    """Of all tokens of these documents (JSON), that of the first 0."""
    from titan_rl.policy.token_score_recorder import TokenScoreRecorder

    policy, batch = updater(device, dtype=dtype), batch_of(json.loads(documents), trained_share=1)
    kept = TokenScoreRecorder((index, 0) for index in range(len(batch)))
    policy.train_step(batch, policy.plan(batch), kept)
    return [[0.0, *scores.logprobs.tolist()] for _, scores in sorted(kept.scores.items())]


def train_step(device: str, ranks: str) -> list[float]:
    """Loss and gradient norm of a step and, of one rank, all weights after it."""
    policy, batch = updater(device, data_parallel=int(ranks)), batch_of(DOCUMENTS)
    metrics = policy.train_step(batch, policy.plan(batch))
    weights = [value for shard in policy.local_shards() for value in shard.data.flatten().tolist()]
    return [metrics["loss"], metrics["grad_norm"], *(weights if ranks == "1" else [])]


def elsewhere(function: str, *arguments: str, ranks: int = 1) -> Any:
    """What the function returns on rank 0 of `ranks` fresh processes."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result"
        command = [sys.executable, __file__, "--inside", function, str(result), *arguments]
        world = {"WORLD_SIZE": str(ranks), "TITAN_RL_RENDEZVOUS": f"{scratch}/rendezvous"}
        places = [os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        processes = [subprocess.Popen(command, env=place) for place in places]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"{function} on {arguments[0]} ended with exit codes {codes}")
        return json.loads(result.read_text())


# -- the checks --


def trainer_step(device: str) -> Finding:
    """One optimizer step in float32."""
    ours, reference = elsewhere("train_step", device, "1"), elsewhere("train_step", "cpu", "1")
    return compared("loss, gradient norm and weights", ours, reference, FLOAT32_TOLERANCE)


def attention(device: str) -> Finding:
    """Logprobs of packed documents in bfloat16 (on CUDA by the varlen kernel), against float32."""
    documents = json.dumps(DOCUMENTS)
    ours = elsewhere("logprobs", device, "bfloat16", documents)
    reference = elsewhere("logprobs", "cpu", "float32", documents)
    return compared("logprobs", sum(ours, []), sum(reference, []), BFLOAT16_TOLERANCE)


def fingerprints(device: str) -> Finding:
    """Sums over the device's memory, of whole tensors and of boxes."""
    import torch

    from titan_rl.weights.fingerprint import shard_fingerprint

    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(3000, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
        for top, bottom, left, right in ((0, 3000, 0, 700), (7, 2001, 0, 700), (5, 9, 3, 8)):
            box, where = whole[top:bottom, left:right], (whole.shape, (top, left))
            if shard_fingerprint(box.to(device), *where) != shard_fingerprint(box, *where):
                wrong.append(f"{dtype} {tuple(box.shape)}")
    return Finding("differs" if wrong else "works", f"6 tensors; other than the CPU's: {', '.join(wrong) or 'none'}")


def publication(device: str) -> Finding:
    """A trainer publishes from the device's memory; what is read and copied back to the device is verified."""
    import torch

    from titan_rl.types import PolicyVersion
    from titan_rl.weights.manifest import TensorShard
    from titan_rl.weights.publisher import SharedMemoryPublisher
    from titan_rl.weights.puller import SharedMemoryReader, verify

    policy = updater(device)
    publisher = SharedMemoryPublisher(channel="gpucheck", rank=0, group=None, max_live=2)
    try:
        settings: dict[str, Any] = {"dtype": torch.bfloat16, "aliases": policy.aliases}
        published = publisher.publish(PolicyVersion(0, 0), policy.local_shards(), **settings)
        served = {name: tensor.to(device) for name, tensor in SharedMemoryReader().tensors(published)}
        served |= {alias: served[name] for alias, name in policy.aliases}

        verify(published, (TensorShard.whole(name, tensor) for name, tensor in served.items()), None)
    finally:
        publisher.close()
    return Finding("works", f"{len(served)} tensors are what was published")


def ranks(device: str) -> Finding:
    """A step of data-parallel ranks, one per device (NCCL on CUDA)."""
    if (count := min(4, devices()) if device == "cuda" else 2) < 2:
        return Finding("not tried", "NCCL takes a device per rank, and there is one CUDA device")
    ours, alone = elsewhere("train_step", device, str(count), ranks=count), elsewhere("train_step", "cpu", "1")
    return compared(f"{count} ranks: loss and gradient norm", ours, alone[:2], FLOAT32_TOLERANCE)


def engine(device: str) -> Finding:
    """vLLM samples, sleeps and wakes up; its logprobs against those of the trainer."""
    import numpy as np
    from vllm.platforms import current_platform

    from titan_rl.generation.config import GeneratorConfig
    from titan_rl.generation.vllm.engine import VllmEngine
    from titan_rl.types import GenerationRequest, SamplingParams

    if current_platform.device_type != device:
        return Finding("not tried", f"the installed vLLM computes on {current_platform.device_type or 'nothing'} here")
    dtype, tolerance = ("bfloat16", BFLOAT16_TOLERANCE) if device == "cuda" else ("float32", FLOAT32_TOLERANCE)
    memory = {"kv_cache_bytes": 16 << 20, "gpu_memory_utilization": 0.3, "sleep_mode": True}
    config = GeneratorConfig(dtype=dtype, **memory)  # type: ignore[arg-type]
    engine = VllmEngine(config, tiny_model(), device)
    prompts = [list(range(2, 4 + index)) for index in range(8)]
    for index, prompt in enumerate(prompts):
        tokens, sampling = np.array(prompt, np.int32), SamplingParams(max_new_tokens=12, temperature=1.0)
        engine.add(GenerationRequest(request_id=str(index), prompt_token_ids=tokens, sampling=sampling, seed=index))
    done = {}
    while engine.has_work():
        done |= {int(each.request_id): each for each in engine.step().finished}
    freed = engine.sleep() >> 20
    engine.wake()
    engine.close()
    documents = [prompt + done[index].token_ids.tolist() for index, prompt in enumerate(prompts)]
    trainer = elsewhere("logprobs", "cpu", "float32", json.dumps(documents))
    reference = [value for row, prompt in zip(trainer, prompts, strict=True) for value in row[len(prompt) :]]
    ours = [value for index in range(len(prompts)) for value in done[index].logprobs.tolist()]
    return compared(f"slept ({freed} MiB freed) and woke up; {dtype} logprobs", ours, reference, tolerance)


def whole_run(device: str) -> Finding:
    """Three steps of the recipe copy4."""
    if device == "cuda" and devices() < 2:
        return Finding(
            "not tried", "the trainer takes a device and so does the generator, and there is one CUDA device"
        )
    dtype = "bfloat16" if device == "cuda" else "float32"
    settings = f"--placement.device {device} --generator.count 1 --generator.dtype {dtype} --trainer.dtype {dtype}"
    command = f"-m titan_rl.train --recipe copy4 {settings} --loop.steps 3 --evaluation.prompts 50".split()
    with tempfile.TemporaryDirectory() as directory:
        end = ["--evaluation.target_exact_match", "0.0", "--logging.directory", directory]
        run = subprocess.run([sys.executable, *command, *end], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    detail = (run.stdout.strip().splitlines() or ["it printed nothing"])[-1]
    return Finding("failed" if run.returncode else "works", f"exit code {run.returncode}: {detail}")


CHECKS = (trainer_step, attention, fingerprints, publication, ranks, engine, whole_run)


def devices() -> int:
    import torch

    return torch.cuda.device_count()


def nothing_to_try(device: str) -> str:
    """Why no check can be tried; empty where some can."""
    import torch

    if device == "cpu" or devices():
        return ""
    return f"torch {torch.__version__} " + ("finds no CUDA device" if torch.version.cuda else "is built without CUDA")


def run_check(name: str, device: str, seconds: float) -> Finding:
    """In a process of its own."""
    from titan_rl.generation.config import generator_environment

    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = os.environ | world | (generator_environment(device) if name == "engine" else {})
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result"
        command = [sys.executable, __file__, "--inside", name, str(result), device]
        limit = ["timeout", "--signal=KILL", str(seconds)]  # ends what the check has started, too
        code = subprocess.run([*limit, *command], env=environment, stdout=sys.stderr).returncode
        detail = f"killed after {seconds:.0f} s" if code in (-9, 137) else f"exit code {code}"
        finding = Finding(*json.loads(result.read_text())) if result.exists() else Finding("failed", detail)
    return finding._replace(seconds=round(time.monotonic() - began, 1))


def inside(function: str, result: str, *arguments: str) -> None:
    """Call it in this process; rank 0 writes what came of it."""
    try:
        value = globals()[function](*arguments)
    except Exception as error:
        if function not in {check.__name__ for check in CHECKS}:
            raise
        traceback.print_exc()
        value = Finding("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(value))


def main() -> int:
    names = [check.__name__ for check in CHECKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", choices=names, help="this check; may be given several times")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of a check")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(*arguments.inside)
        return 0
    problem = nothing_to_try(arguments.device)
    findings = {}
    for name in arguments.only or names:
        found = Finding("not tried", problem) if problem else run_check(name, arguments.device, arguments.seconds)
        findings[name] = found
        print(f"{name:<13} {found.verdict:<9} {found.seconds:6.1f} s  {found.detail}", flush=True)
    print(json.dumps({name: finding._asdict() for name, finding in findings.items()}))
    verdicts = {finding.verdict for finding in findings.values()}
    return 1 if verdicts & {"differs", "failed"} else 0 if "works" in verdicts else 3


if __name__ == "__main__":
    sys.exit(main())
