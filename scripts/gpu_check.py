#!/usr/bin/env python
"""Tries every GPU path of titan_rl that this machine allows, one by one, and says what came of each.

    .venv/bin/python scripts/gpu_check.py [--only NAME …] [--seconds 600] [--device cuda]

Each check has processes of its own and a time limit. The output is a table, the ends of the logs of what failed, then
one line of JSON. References are computed on the CPU by processes that see no GPU. What no time is left for after ten
minutes is not tried. `--device cpu` runs every check on the CPU: a test of this script, not of a GPU.

Exit codes: 0 all that could be tried works · 1 something failed or differs too much · 3 nothing could be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chaos_parts.faults import MARK, marked, meshes

ROOT = Path(__file__).resolve().parents[1]

DOCUMENTS = [[2 + (7 * index + 5 * at * at) % 11 for at in range(8 + 11 * index % 40)] for index in range(24)]
"""Token ids of many lengths."""

FLOAT32_TOLERANCE = 1e-4
"""Of logprobs, and of weights after a step at learning rate 1e-3: only the order of sums is another one."""
GRADIENT_TOLERANCE = 0.02
"""Of loss and gradient norm in bfloat16 over ranks, as a share of those in float32."""
EIGHT_B = {
    "dim": 4096,
    "layers": 36,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 12288,
    "tied_embeddings": False,
}
BFLOAT16_TOLERANCE = 0.05
"""Of a logprob (nats) against float32: the mean at which `trainer.logprob_alarm` warns."""


LOG_CHARACTERS = 3000
"""So much of the end of a failed process's log is shown."""


class Finding(NamedTuple):
    verdict: str  # works, differs, failed or not tried
    detail: str
    seconds: float = 0.0
    log: str = ""
    """The end of it, where the check failed."""


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

    # A large eps: where a gradient is near 0 its rounding would else decide the sign of the first step.
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-3, eps=1e-3), max_tokens_per_microbatch=256, **settings)
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
        numbers = {"group_id": index, "sample": 0, "advantages": 1.0 - 0.3 * (index % 7), "reward": 0.0}
        return TrainingSample(token_ids=np.array(row, np.int32), **arrays, **numbers)

    return SampleBatch.of(document(index, row) for index, row in enumerate(rows))


def logprobs(device: str, dtype: str, documents: str) -> list[list[float]]:
    """Of all tokens of these documents (JSON), that of the first 0."""
    from titan_rl.policy.token_score_recorder import TokenScoreRecorder

    policy, batch = updater(device, dtype=dtype), batch_of(json.loads(documents), trained_share=1)
    kept = TokenScoreRecorder((index, 0) for index in range(len(batch)))
    policy.train_step(batch, policy.plan(batch), kept)
    return [[0.0, *scores.logprobs.tolist()] for _, scores in sorted(kept.scores.items())]


def train_step(device: str, data: str = "1", tensor: str = "1", dtype: str = "float32", fixed: str = "") -> list[float]:
    """Loss and gradient norm of a step and, of one rank, all weights after it. `fixed`: deterministically."""
    ranks: dict[str, Any] = {"data_parallel": int(data), "tensor_parallel": int(tensor)}
    policy, batch = updater(device, dtype=dtype, deterministic=bool(fixed), **ranks), batch_of(DOCUMENTS)
    metrics = policy.train_step(batch, policy.plan(batch))
    weights = [value for shard in policy.local_shards() for value in shard.data.flatten().tolist()]
    return [metrics["loss"], metrics["grad_norm"], *(weights if data == tensor == "1" else [])]


def resumed(device: str) -> float:
    """The largest difference of weights between a run of two steps and one that goes on from a checkpoint of its
    first."""
    batch, weights = batch_of(DOCUMENTS), []
    with tempfile.TemporaryDirectory() as directory:
        for goes_on in (False, True):
            policy = updater(device)
            if goes_on:
                policy.restore(Path(directory) / "state", 0)
            else:
                policy.train_step(batch, policy.plan(batch))
                policy.begin_save(Path(directory) / "state")
                policy.finish_save()
            policy.train_step(batch, policy.plan(batch))
            weights.append([shard.data.detach().clone() for shard in policy.local_shards()])
    return max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))


PROMPTS = [list(range(2, 4 + index)) for index in range(8)]


def engine_life(device: str, tensor_parallel: str) -> dict[str, Any]:
    """Samples, takes other weights while it decodes, then sleeps, wakes up, loads the first ones and samples again."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from titan_rl.generation.config import GeneratorConfig
    from titan_rl.generation.vllm.engine import VllmEngine
    from titan_rl.types import GenerationRequest, PolicyVersion, SamplingParams
    from titan_rl.weights.manifest import TIED, TensorShard
    from titan_rl.weights.publisher import SharedMemoryPublisher
    from titan_rl.weights.puller import SharedMemoryReader, verify

    dtype = "bfloat16" if device == "cuda" else "float32"
    settings: dict[str, Any] = {"kv_cache_bytes": 16 << 20, "gpu_memory_utilization": 0.3, "sleep_mode": True}
    ranks = int(tensor_parallel)
    engine = VllmEngine(GeneratorConfig(dtype=dtype, tensor_parallel=ranks, **settings), tiny_model(), device)
    group = torch.distributed.new_group(backend="gloo") if ranks > 1 else None

    def add() -> None:
        for index, prompt in enumerate(PROMPTS):
            tokens, sampling = np.array(prompt, np.int32), SamplingParams(max_new_tokens=12, temperature=1.0)
            engine.add(GenerationRequest(request_id=str(index), prompt_token_ids=tokens, sampling=sampling, seed=index))

    def finish() -> list[tuple[list[int], list[float]]]:
        done = {}
        while engine.has_work():
            done |= {int(each.request_id): each for each in engine.step().finished}
        return [(done[index].token_ids.tolist(), done[index].logprobs.tolist()) for index in range(len(PROMPTS))]

    weights = load_file(Path(tiny_model()) / "model.safetensors")
    publisher = SharedMemoryPublisher(channel=f"gpucheck{os.environ['RANK']}", rank=0, group=None, max_live=2)

    def load(version: int, scale: float) -> None:
        shards = [TensorShard.whole(name, tensor * scale) for name, tensor in weights.items()]
        settings: dict[str, Any] = {"dtype": getattr(torch, dtype), "aliases": TIED}
        published = publisher.publish(PolicyVersion(0, version), shards, **settings)
        engine.load_weights(SharedMemoryReader().tensors(published), PolicyVersion(0, version))
        verify(published, engine.served_shards(), group)

    try:
        add()
        first = finish()
        add()
        engine.step()
        load(1, 1.5)  # under running requests
        engine.drop_cache()
        other = finish()
        freed = engine.sleep() >> 20
        engine.wake()
        load(2, 1.0)
        add()
        again = finish()
    finally:
        publisher.close()
    engine.close()
    return {"first": first, "changed": other != first, "same": again == first, "freed": freed}


WAYS: tuple[dict[str, Any], ...] = ({}, {"top_k": 3}, {"top_p": 0.8}, {"repetition_penalty": 1.2})


def other_answers(device: str, head_dim: str) -> dict[str, list[str]]:
    """By the way in which a deterministic engine got its requests: those that were answered otherwise than alone, in
    tokens or in a bit of a logprob."""
    import random

    import numpy as np

    from titan_rl.generation.config import GeneratorConfig
    from titan_rl.generation.vllm.engine import VllmEngine
    from titan_rl.policy.config import TinyPolicyConfig
    from titan_rl.policy.models.tiny import make_tiny_policy
    from titan_rl.types import GenerationRequest, SamplingParams

    rng, requests = random.Random(0), []
    for index in range(96 if device == "cuda" else 24):
        prompt = np.array([2 + rng.randrange(10) for _ in range(rng.choice((1, 5, 9, 10, 40, 130, 400)))], np.int32)
        sampling = SamplingParams(max_new_tokens=rng.choice((6, 20, 60)), temperature=1.0, **rng.choice(WAYS))
        requests.append(
            GenerationRequest(request_id=f"{index}", prompt_token_ids=prompt, sampling=sampling, seed=index)
        )
    model = make_tiny_policy(TinyPolicyConfig(head_dim=int(head_dim), max_length=512))
    settings: dict[str, Any] = {"kv_cache_bytes": 128 << 20, "shares_device": True, "max_model_len": 512}
    settings |= {"dtype": "bfloat16" if device == "cuda" else "float32", "deterministic": True}
    engine = VllmEngine(GeneratorConfig(**settings), str(model), device)

    def answers(waves: list[list[GenerationRequest]], drops: bool = False) -> dict[str, tuple[bytes, bytes]]:
        done, step = {}, 0
        while waves or engine.has_work():
            for request in waves.pop(0) if waves else ():
                engine.add(request)
            done |= {e.request_id: (e.token_ids.tobytes(), e.logprobs.tobytes()) for e in engine.step().finished}
            step += 1
            if drops and step % 7 == 5:
                engine.drop_cache()
        engine.drop_cache()
        return done

    alone: dict[str, tuple[bytes, bytes]] = {}
    for request in requests:
        alone |= answers([[request]])
    found = {
        "together": answers([requests]),
        "backwards": answers([requests[::-1]]),
        "trickling": answers([requests[at : at + 2] for at in range(0, len(requests), 2)]),
        "preempted": answers([requests], drops=True),
    }
    engine.close()
    return {way: sorted(each for each in theirs if theirs[each] != alone[each]) for way, theirs in found.items()}


def elsewhere(function: str, *arguments: str, places: Sequence[Mapping[str, str]] = ({},)) -> Any:
    """What the function returns on rank 0 of fresh processes, each with its variables. On the CPU they see no GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        result, command = Path(scratch) / "result", [sys.executable, __file__, "--inside", function]
        world = {"WORLD_SIZE": str(len(places)), "TITAN_RL_RENDEZVOUS": f"{scratch}/rendezvous", "LOCAL_RANK": "0"}
        world |= {"CUDA_VISIBLE_DEVICES": ""} if arguments[0] == "cpu" else {}
        processes, logs = [], []
        for rank, place in enumerate(places):
            logs.append(Path(scratch) / f"log{rank}")
            with logs[-1].open("w") as log:
                variables = os.environ | world | {"RANK": str(rank)} | place
                words = [*command, str(result), *arguments]
                processes.append(subprocess.Popen(words, env=variables, stdout=log, stderr=subprocess.STDOUT))
        while (codes := [process.poll() for process in processes]) and None in codes and not any(codes):
            time.sleep(0.1)
        for process in processes:
            process.kill()  # ranks whose peer has failed would wait for it for ever
            process.wait()
        if any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            print(logs[failed].read_text()[-LOG_CHARACTERS:], file=sys.stderr)
            raise RuntimeError(f"{function} on {arguments[0]}: rank {failed} ended with exit code {codes[failed]}")
        return json.loads(result.read_text())


def trainer_places(device: str, ranks: int) -> list[dict[str, str]]:
    """As in a run: each rank sees one device."""
    return [{"CUDA_VISIBLE_DEVICES": str(rank)} if device == "cuda" else {} for rank in range(ranks)]


def generator_places(device: str, ranks: int, **more: Any) -> list[dict[str, str]]:
    """What the placement of a run gives the ranks of a generator."""
    from titan_rl.config import ServeConfig
    from titan_rl.config_registry import copy4
    from titan_rl.gateway.config import GatewayConfig
    from titan_rl.hosts.facts import detect_host
    from titan_rl.overrides import variant
    from titan_rl.supervision.placement import plan

    settings = {"placement.device": device, "generator.count": 1, "generator.tensor_parallel": ranks} | more
    served = ServeConfig.of(variant(copy4(), settings), GatewayConfig())
    mesh = plan(served, detect_host()).meshes["generator0"]
    places = []
    for rank, (variables, number) in enumerate(zip(mesh.env, mesh.devices, strict=True)):
        seen = variables["CUDA_VISIBLE_DEVICES"].split(",")
        places.append(variables | {"LOCAL_RANK": str(rank if number is None else seen.index(str(number)))})
    return places


# -- the checks --


def trainer_step(device: str) -> Finding:
    """One optimizer step in float32."""
    ours, reference = elsewhere("train_step", device), elsewhere("train_step", "cpu")
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

    from titan_rl.weights.fingerprint import shard_sum

    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(3000, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
        for top, bottom, left, right in ((0, 3000, 0, 700), (7, 2001, 0, 700), (5, 9, 3, 8)):
            box, where = whole[top:bottom, left:right], (whole.shape, (top, left))
            if shard_sum(box.to(device), *where).cpu() != shard_sum(box, *where):
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


def on_ranks(device: str, data: int, tensor: int, dtype: str, tolerance: float) -> Finding:
    if device == "cuda" and devices() < data * tensor:
        return Finding("not tried", f"it takes {data * tensor} devices, and there are {devices()}")
    places = trainer_places(device, data * tensor)
    ours = elsewhere("train_step", device, str(data), str(tensor), dtype, places=places)
    alone = elsewhere("train_step", "cpu")[:2]
    bounds = [tolerance * max(1.0, abs(value)) for value in alone]
    difference = max(abs(a - b) / bound for a, b, bound in zip(ours, alone, bounds, strict=True))
    detail = f"loss and gradient norm of {data} x {tensor} ranks: {difference:.2g} of what may differ from the CPU's"
    return Finding("works" if difference <= 1 else "differs", detail)


def ranks(device: str) -> Finding:
    """A step of data-parallel ranks in float32, one per device (NCCL on CUDA)."""
    return on_ranks(device, min(4, devices()) if device == "cuda" and devices() > 1 else 2, 1, "float32", 1e-4)


def ranks_bf16(device: str) -> Finding:
    """The same in bfloat16: FSDP's mixed precision, and on CUDA the varlen kernel."""
    return on_ranks(device, 2, 1, "bfloat16", GRADIENT_TOLERANCE)


def trainer_tp(device: str) -> Finding:
    """The same with tensor parallelism."""
    return on_ranks(device, 1, 2, "bfloat16", GRADIENT_TOLERANCE)


def deterministic(device: str) -> Finding:
    """The same step twice in deterministic mode, in bfloat16."""
    place = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    once, again = (elsewhere("train_step", device, "1", "1", "bfloat16", "yes", places=[place]) for _ in range(2))
    return Finding("works" if once == again else "differs", f"{len(once)} numbers of two steps, bit for bit")


def checkpoint(device: str) -> Finding:
    """A run that goes on from a checkpoint against one that was not interrupted."""
    difference = elsewhere("resumed", device)
    return Finding("works" if difference == 0 else "differs", f"weights differ by {difference:.2g}")


def weights_speed(device: str) -> Finding:
    """A publication of 256M parameters against one plain copy of its bytes from the device."""
    import torch

    from titan_rl.types import PolicyVersion
    from titan_rl.weights.manifest import TensorShard
    from titan_rl.weights.publisher import SharedMemoryPublisher

    size = 256 if device == "cuda" else 16
    shards = [TensorShard.whole(f"{index}", torch.randn(1024, 1024, device=device)) for index in range(size)]
    publisher = SharedMemoryPublisher(channel="gpucheck", rank=0, group=None, max_live=2)
    try:
        seconds = []
        for version in range(3):  # each slot is new at its first use
            began = time.monotonic()
            published = publisher.publish(PolicyVersion(0, version), shards, dtype=torch.bfloat16, aliases=())
            seconds.append(time.monotonic() - began)
            publisher.release(published.version)
    finally:
        publisher.close()
    began = time.monotonic()
    for shard in shards:
        shard.data.to(torch.bfloat16).cpu()
    copied = time.monotonic() - began
    rate = 2 * size / 1024 / seconds[-1]
    return Finding("works", f"{rate:.2f} GiB/s of bfloat16, {seconds[-1] / copied:.1f} times plain copies to the host")


def engine_with(device: str, tensor_parallel: int) -> Finding:
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        return Finding("not tried", f"the installed vLLM computes on {current_platform.device_type or 'nothing'} here")
    if device == "cuda" and devices() < tensor_parallel:
        return Finding("not tried", f"it takes {tensor_parallel} devices, and there are {devices()}")
    places = generator_places(device, tensor_parallel)
    life = elsewhere("engine_life", device, str(tensor_parallel), places=places)
    documents = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, life["first"], strict=True)]
    trainer = elsewhere("logprobs", "cpu", "float32", json.dumps(documents))
    reference = [value for row, prompt in zip(trainer, PROMPTS, strict=True) for value in row[len(prompt) :]]
    ours = [value for _, logprobs in life["first"] for value in logprobs]
    found = compared("logprobs", ours, reference, BFLOAT16_TOLERANCE if device == "cuda" else FLOAT32_TOLERANCE)
    told = f"{life['freed']} MiB freed asleep; {found.detail}"
    if not (life["changed"] and life["same"]):
        told = f"new weights changed tokens: {life['changed']}; the first ones gave the first tokens: {life['same']}"
        return Finding("differs", told)
    return found._replace(detail=told)


def engine(device: str) -> Finding:
    """vLLM samples, takes verified weights under running requests, sleeps, wakes up, and samples as before."""
    return engine_with(device, 1)


def engine_tp2(device: str) -> Finding:
    """The same on two ranks, as a run places them."""
    return engine_with(device, 2)


def engine_batches(device: str) -> Finding:
    """In deterministic mode the batch changes no bit of an answer."""
    places = generator_places(device, 1, deterministic=True)
    others = elsewhere("other_answers", device, "128", places=places)
    told = ", ".join(f"{len(names)} when {way}" for way, names in others.items())
    return Finding("differs" if any(others.values()) else "works", f"answers other than alone: {told}")


def whole_run_8b(device: str) -> Finding:
    """Three steps of a policy with the layers of Qwen3-8B and random weights, on 8 devices; on the CPU a tiny one."""
    if device == "cuda" and devices() < 8:
        return Finding("not tried", f"it takes 8 devices, and there are {devices()}")
    layout = {"trainer.data_parallel": 4, "generator.count": 2, "generator.tensor_parallel": 2}
    sizes = {f"policy.tiny.{name}": value for name, value in EIGHT_B.items()}
    settings = layout | {"trainer.activation_checkpointing": "full", "checkpoint.keep": 0} | sizes
    settings |= {"logging.save_final": False}
    return whole_run(device, **settings if device == "cuda" else {})


def whole_run(device: str, **more: Any) -> Finding:
    """Three steps of the recipe copy4; trainer and generator share a device where there is one."""
    more |= {"placement.ranks_per_device": 2} if device == "cuda" and devices() < 2 else {}
    dtype = "bfloat16" if device == "cuda" else "float32"
    settings = f"--placement.device {device} --generator.count 1 --generator.dtype {dtype} --trainer.dtype {dtype}"
    command = f"-m titan_rl.train --recipe copy4 {settings} --loop.steps 3 --evaluation.prompts 50".split()
    with tempfile.TemporaryDirectory() as directory:
        end = ["--evaluation.target_exact_match", "0.0", "--logging.directory", directory]
        end += [word for name, value in more.items() for word in (f"--{name}", str(value).lower())]
        run = subprocess.run([sys.executable, *command, *end], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    detail = (run.stdout.strip().splitlines() or ["it printed nothing"])[-1]
    return Finding("failed" if run.returncode else "works", f"exit code {run.returncode}: {detail}")


def survives(device: str) -> Finding:
    """Two deterministic runs side by side, one of which loses a rank of its generator and then one of its trainer: the
    same steps. On 8 devices, and on the CPU, both have two ranks, and the other one is left in a collective."""
    dtype, marks = "bfloat16" if device == "cuda" else "float32", ("undisturbed", "disturbed")
    layout = f"--placement.device {device} --generator.count 1 --generator.dtype {dtype} --trainer.dtype {dtype}"
    seen: tuple[dict[str, str], ...] = ({}, {})
    if device == "cpu" or devices() >= 8:
        layout += " --generator.tensor_parallel 2 --trainer.data_parallel 2"
        if device == "cuda":
            every = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
            seen = tuple({"CUDA_VISIBLE_DEVICES": ",".join(half)} for half in (every[:4], every[4:8]))
    else:
        layout += " --placement.ranks_per_device 4"
    layout += " --evaluation.target_exact_match 0.0"
    command = (
        f"-m titan_rl.train --recipe copy4 {layout} --deterministic --loop.steps 24 --evaluation.prompts 50".split()
    )
    with tempfile.TemporaryDirectory() as directory:
        runs = {}
        for mark, its in zip(marks, seen, strict=True):
            words = [sys.executable, *command, "--logging.directory", directory, "--logging.name", mark]
            variables = os.environ | its | {MARK: mark}
            runs[mark] = subprocess.Popen(words, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
        lost: list[str] = []
        for at, part in ((6, "generator0"), (14, "trainer")):
            while len(steps_of(directory, marks[1])) < at and runs[marks[1]].poll() is None:
                time.sleep(0.05)
            for process in [each for each in meshes(marked(marks[1])) if each.mesh == part][-1:]:
                os.kill(process.pid, signal.SIGKILL)
                lost.append(str(process))
        codes = [run.wait() for run in runs.values()]
        ours, theirs = (steps_of(directory, mark) for mark in marks)
    if any(codes) or len(lost) != 2:
        return Finding("failed", f"exit codes {codes}; killed: {', '.join(lost) or 'nothing'}")
    equal = [a == b for a, b in zip(ours, theirs, strict=True)]
    detail = f"{sum(equal)} of {len(equal)} steps are equal in every bit, without {' and '.join(lost)}"
    return Finding("works" if all(equal) else "differs", detail)


def steps_of(directory: str, mark: str) -> list[list[float]]:
    """What a run has written of its steps so far."""
    names = ("train/loss", "train/grad_norm", "train/logprob_difference_mean", "rollout/reward_mean")
    lines = [line for file in Path(directory).glob(f"{mark}*/metrics.jsonl") for line in file.read_text().splitlines()]
    return [[row[name] for name in names] for line in lines if "train/loss" in (row := json.loads(line))]


CHECKS = (
    trainer_step,
    attention,
    fingerprints,
    publication,
    engine,
    engine_tp2,
    engine_batches,
    ranks,
    ranks_bf16,
    trainer_tp,
    checkpoint,
    deterministic,
    weights_speed,
    whole_run,
    survives,
    whole_run_8b,
)


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
    environment = os.environ | world | (generator_environment(device) if name.startswith("engine") else {})
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result"
        command = [sys.executable, __file__, "--inside", name, str(result), device]
        limit = ["timeout", "--signal=KILL", str(seconds)]  # ends what the check has started, too
        with (log := Path(scratch) / "log").open("w") as output:
            done = subprocess.run([*limit, *command], env=environment, stdout=output, stderr=subprocess.STDOUT)
        code, end = done.returncode, log.read_text()[-LOG_CHARACTERS:]
        detail = f"killed after {seconds:.0f} s" if code in (-9, 137) else f"exit code {code}"
        finding = Finding(*json.loads(result.read_text())) if result.exists() else Finding("failed", detail)
        finding = finding._replace(log=end if finding.verdict == "failed" else "")
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
    parser.add_argument("--in-all", type=float, default=600.0, help="time limit of all checks (seconds)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(*arguments.inside)
        return 0
    problem = nothing_to_try(arguments.device)
    findings, began = {}, time.monotonic()
    for name in arguments.only or names:
        left = arguments.in_all - (time.monotonic() - began)
        why = problem or ("" if left > 0 else "no time is left")
        found = Finding("not tried", why) if why else run_check(name, arguments.device, min(arguments.seconds, left))
        findings[name] = found
        print(f"{name:<13} {found.verdict:<9} {found.seconds:6.1f} s  {found.detail}", flush=True)
    for name, found in findings.items():
        if found.log:
            print(f"\n-- the end of the log of {name} --\n{found.log}")
    print(json.dumps({name: finding._asdict() for name, finding in findings.items()}))
    verdicts = {finding.verdict for finding in findings.values()}
    return 1 if verdicts & {"differs", "failed"} else 0 if "works" in verdicts else 3


if __name__ == "__main__":
    sys.exit(main())
