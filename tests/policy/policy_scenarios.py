"""What ranks do in the trainer tests; also the batches and the reference they are compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from support.ranks import Scenario
from support.supports import supports_of

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import StorageError, TrainingError
from titan_rl.policy.config import LossConfig, OptimizerConfig, TrainerConfig
from titan_rl.policy.token_score_recorder import TokenScoreRecorder
from titan_rl.policy.updater import PolicyUpdater, import_torchtitan
from titan_rl.types import NO_VERSION, TrainingSample

import_torchtitan("cpu")  # here, or every rank that is forked would import it

VOCAB = 13

# With these AdamW is a function of the gradient alone: change = -LR * g / (|g| + EPS), so the change of the weights
# tells the gradient.
LR, EPS = 1e4, 1.0
REVEALING = OptimizerConfig(lr=LR, betas=(0.0, 0.0), eps=EPS, max_grad_norm=0.0)


def gradient_of(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    change = after.astype(np.float64) - before
    return -change * EPS / (LR - np.abs(change))


def sample(
    rng: np.random.Generator, index: int, prompt: int, answer: int, *, version: int = 0, logprob: float = -2.5
) -> TrainingSample:
    length = prompt + answer
    mask = np.arange(length) >= prompt
    return TrainingSample(
        group_id=index // 2,
        sample=index % 2,
        token_ids=rng.integers(2, VOCAB, length).astype(np.int32),
        loss_mask=mask,
        # Far from on-policy, to both sides, so that both clips bite.
        logprobs=np.where(mask, logprob + 0.5 * rng.standard_normal(length), 0).astype(np.float32),
        versions=np.where(mask, version, NO_VERSION).astype(np.int64),
        advantages=float(rng.standard_normal()),
        reward=0.0,
    )


def lopsided_batch() -> SampleBatch:
    """On two ranks of 64-token micro-batches: one rank gets one long sample without a trained token, the other two
    micro-batches."""
    rng = np.random.default_rng(3)
    lengths = [(60, 0), (3, 30), (20, 13)]
    return SampleBatch.of(sample(rng, index, *length) for index, length in enumerate(lengths))


def group(rng: np.random.Generator, group_id: int, prompt: int, answers: list[int]) -> list[TrainingSample]:
    """Samples that begin with the same prompt."""
    samples = [sample(rng, 0, prompt, answer) for answer in answers]
    for entry in samples:
        entry.token_ids[:prompt] = samples[0].token_ids[:prompt]
    return [replace(entry, group_id=group_id, sample=number) for number, entry in enumerate(samples)]


def mixed_batch() -> SampleBatch:
    """Many lengths, prompts of several samples, several micro-batches on every rank."""
    rng = np.random.default_rng(4)
    lengths = [(int(rng.integers(1, 20)), int(rng.integers(1, 30))) for _ in range(16)]
    samples = [sample(rng, index, *length) for index, length in enumerate(lengths)]
    samples += group(rng, 8, 4, [5] * 8) + group(rng, 9, 12, [6, 1, 15, 6, 1])
    return SampleBatch.of(samples + group(rng, 10, 20, [0, 3, 9]))


def batch_of(step: int) -> SampleBatch:
    """Another batch in every step: other advantages and behaviour logprobs on the same tokens."""
    rng = np.random.default_rng(step)
    return SampleBatch.of(
        replace(
            sample,
            advantages=float(rng.standard_normal()),
            logprobs=np.where(sample.loss_mask, sample.logprobs + 0.1 * rng.standard_normal(), 0).astype(np.float32),
        )
        for sample in mixed_batch().samples
    )


def truncated_batch() -> SampleBatch:
    """The mixed batch, as if some tokens had been drawn from a part of the vocabulary: of any size but one."""
    rng = np.random.default_rng(6)

    def truncated(sample: TrainingSample) -> TrainingSample:
        possible = rng.random((len(sample.token_ids), VOCAB)) < rng.choice(
            [0.1, 0.5, 0.9, 1.0], (len(sample.token_ids), 1)
        )
        possible |= ~sample.loss_mask[:, None]
        possible[np.arange(len(possible)), sample.token_ids] = possible[:, 0] = True
        return replace(sample, supports=supports_of(possible))

    return SampleBatch.of(map(truncated, mixed_batch().samples))


def one_token_batch() -> SampleBatch:
    return SampleBatch.of([sample(np.random.default_rng(5), 0, 4, 1)])


BATCHES = {"lopsided": lopsided_batch, "mixed": mixed_batch, "truncated": truncated_batch, "one token": one_token_batch}


def trainer(data_parallel: int, tensor_parallel: int, **kwargs: Any) -> TrainerConfig:
    kwargs.setdefault("max_tokens_per_microbatch", 64)
    kwargs.setdefault("loss", LossConfig(kwargs={"entropy_bonus": 0.01}))
    return TrainerConfig(data_parallel=data_parallel, tensor_parallel=tensor_parallel, **kwargs)


def updater(model_path: str, config: TrainerConfig, **kwargs: Any) -> PolicyUpdater:
    kwargs = {"temperature": 1.0, "total_steps": 10, "device": "cpu", "seed": 0} | kwargs
    return PolicyUpdater(config, model_path=Path(model_path), **kwargs)


def train(policy_updater: Any, batch: SampleBatch, kept: TokenScoreRecorder | None = None) -> dict[str, float]:
    """One step, planned as the controller plans it."""
    return policy_updater.train_step(batch, policy_updater.plan(batch), kept)


def on_layout(function: Any, layout: tuple[int, int], **kwargs: Any) -> Scenario:
    """`function` on all ranks of a layout: data parallel, tensor parallel."""
    data, tensor = layout
    return Scenario(function, data * tensor, {"data_parallel": data, "tensor_parallel": tensor, **kwargs})


def names_of(batch: SampleBatch) -> list[tuple[int, int]]:
    return [(sample.group_id, sample.sample) for sample in batch.samples]


def logprobs_of(policy_updater: Any, batch: SampleBatch) -> dict[tuple[int, int], np.ndarray]:
    """Of this rank's trained tokens, before the step that this costs."""
    kept = TokenScoreRecorder(names_of(batch))
    train(policy_updater, batch, kept)
    return {name: scores.logprobs for name, scores in kept.scores.items()}


def sampled_with(batch: SampleBatch, logprobs: dict[tuple[int, int], np.ndarray], shift: float = 0.0) -> SampleBatch:
    """The batch as if an engine had sampled it with these logprobs of the trained tokens, moved by a shift."""

    def resampled(sample: TrainingSample) -> TrainingSample:
        array = np.zeros(len(sample.token_ids), np.float32)
        array[sample.loss_mask] = logprobs[sample.group_id, sample.sample] + np.float32(shift)
        return replace(sample, logprobs=array)

    return SampleBatch.of(map(resampled, batch.samples))


def shards_of(policy_updater) -> list[tuple]:
    return [
        (shard.name, shard.data.numpy().copy(), shard.global_shape, shard.offset, shard.counted)
        for shard in (policy_updater.base if policy_updater.base is not None else policy_updater.local_shards())
    ]


def assemble(ranks: list[list[tuple]]) -> dict[str, np.ndarray]:
    """Whole tensors from all ranks' shards; fails unless the counted shards cover each exactly once."""
    whole: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for shards in ranks:
        for name, data, shape, offset, counted in shards:
            box = tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))
            if counted:
                whole.setdefault(name, np.zeros(shape, data.dtype))[box] = data
                seen.setdefault(name, np.zeros(shape, int))[box] += 1
    assert all((count == 1).all() for count in seen.values())
    for shards in ranks:
        for name, data, _, offset, _ in shards:
            box = tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))
            np.testing.assert_array_equal(whole[name][box], data)
    return whole


def gradients(before: list[list[tuple]], after: list[list[tuple]]) -> dict[str, np.ndarray]:
    """Of a `REVEALING` step, from all ranks' shards."""
    old, new = assemble(before), assemble(after)
    return {name: gradient_of(old[name], new[name]) for name in old}


def relative_error(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The largest relative error (2-norm) of any tensor."""
    assert got.keys() == wanted.keys()
    return max(np.linalg.norm(got[name] - wanted[name]) / np.linalg.norm(wanted[name]) for name in wanted)


def transformer(path: Path) -> Any:
    """The same policy as transformers computes it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def by_expert(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of transformers, which stacks experts, by the names of the checkpoint."""
    found = {name: array for name, array in arrays.items() if ".experts." not in name}
    for name in arrays.keys() - found:
        prefix, _, kind = name.rpartition(".")
        for number, matrix in enumerate(arrays[name]):
            parts = (
                {"down": matrix} if kind == "down_proj" else dict(zip(("gate", "up"), np.split(matrix, 2), strict=True))
            )
            found |= {f"{prefix}.{number}.{part}_proj.weight": array for part, array in parts.items()}
    return found


def layout(
    model_path: str,
    save_to: str,
    data_parallel: int,
    tensor_parallel: int,
    batches: list[str],
    architecture: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """One parallel layout: weights as loaded; of one step on each batch (from the start) weights, metrics, logprobs."""
    config = trainer(data_parallel, tensor_parallel, optimizer=REVEALING, **settings)
    result: dict[str, Any] = {}
    for name in batches:
        policy = updater(model_path, config, temperature=0.7, architecture=architecture)
        if "loaded" not in result:
            result["loaded"] = shards_of(policy)
            result["aliases"] = policy.aliases
        batch = BATCHES[name]()
        kept = TokenScoreRecorder(names_of(batch))
        result[name, "metrics"] = train(policy, batch, kept)
        result[name, "logprobs"] = {sample: scores.logprobs for sample, scores in kept.scores.items()}
        result[name, "weights"] = shards_of(policy)
    policy.save_hf(Path(save_to))
    policy.save_hf(Path(save_to))  # again, over the first
    (others := Path(f"{save_to}-others")).mkdir(exist_ok=True)
    (others / "notes").touch()
    try:
        policy.save_hf(others)
    except StorageError as error:
        result["refused"] = str(error)
    return result


def spoilt_batch(model_path: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    """A good batch, a NaN on one rank's sample, a good batch."""
    policy = updater(model_path, trainer(data_parallel, tensor_parallel))
    good = mixed_batch()
    train(policy, good)
    before = shards_of(policy)
    samples = list(good.samples)
    samples[0].logprobs[-1] = np.nan
    result: dict[str, Any] = {"before": before}
    with_nan = SampleBatch.of(samples)
    try:
        train(policy, with_nan)
    except TrainingError as error:
        result["error"] = str(error)
    result["after"] = shards_of(policy)
    result["step"] = policy.step
    result["next"] = train(policy, mixed_batch())
    return result


def bfloat16(model_path: str, data_parallel: int, tensor_parallel: int) -> list[dict[str, float]]:
    config = trainer(data_parallel, tensor_parallel, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-2))
    policy = updater(model_path, config)
    return [train(policy, mixed_batch()) for _ in range(3)]


def without_plain_sums(model_path: str) -> str:
    """What gloo says to FSDP's own reduction."""
    import titan_rl.policy.models.titan_adaptation as adaptation
    from titan_rl.policy.models.titan_adaptation import choose_device

    choose_device("cpu")
    import titan_rl.policy.models.model as model

    assert model.reduce_gradients_by_plain_sums is adaptation.reduce_gradients_by_plain_sums
    with mock.patch.object(model, "reduce_gradients_by_plain_sums", lambda module: None):
        policy = updater(model_path, trainer(2, 1))
    try:
        train(policy, mixed_batch())
    except RuntimeError as error:
        return str(error)
    return ""


def with_default_backend(model_path: str) -> str:
    """What torchtitan's default SPMD backend says on two ranks."""
    from titan_rl.policy.models.titan_adaptation import choose_device

    choose_device("cpu")
    from torchtitan.distributed.utils import set_spmd_backend

    import titan_rl.policy.models.model as model

    try:
        with mock.patch.object(model, "SPMD_BACKEND", "spmd_types"):
            train(updater(model_path, trainer(2, 1)), mixed_batch())
    except Exception as error:  # whatever it is, it is not a finished step
        return f"{type(error).__name__}: {error}"
    finally:
        set_spmd_backend(model.SPMD_BACKEND)
    return ""


def one_rank(model_path: str, broken: dict[str, str], loss_file: str) -> dict[str, Any]:
    """What needs one rank only, in one process start."""
    from titan_rl.errors import TitanError

    result: dict[str, Any] = {}

    def outcome(name: str, action) -> None:
        try:
            result[name] = action()
        except TitanError as error:
            result[name] = error

    for name, path in broken.items():
        outcome(name, lambda path=path: updater(path, trainer(1, 1)))
    outcome("compiled", lambda: updater(model_path, trainer(1, 1, compile=True)))
    outcome("too many ranks", lambda: updater(model_path, trainer(2, 1)))
    outcome("undivided heads", lambda: updater(model_path, trainer(1, 4)))

    policy = updater(model_path, trainer(1, 1))
    rng = np.random.default_rng(0)
    nothing = SampleBatch.of([sample(rng, 0, 5, 0)])
    outcome("nothing to train", lambda: train(policy, nothing))
    roomy = updater(model_path, trainer(1, 1, max_tokens_per_microbatch=4096))
    too_long = SampleBatch.of([sample(rng, 0, 60, 5)])
    outcome("over the positions", lambda: train(roomy, too_long))
    narrow = updater(model_path, trainer(1, 1, max_tokens_per_microbatch=8))
    outcome("over the budget", lambda: train(narrow, SampleBatch.of([sample(rng, 0, 5, 4)])))
    result["steps after errors"] = policy.step + roomy.step + narrow.step

    batch = mixed_batch()
    result["loaded"] = shards_of(policy)
    for name, config in {
        "plain": trainer(1, 1, optimizer=REVEALING),
        "checkpointed": trainer(1, 1, optimizer=REVEALING, activation_checkpointing="full"),
        "one micro-batch": trainer(1, 1, optimizer=REVEALING, max_tokens_per_microbatch=4096),
        "custom loss": trainer(1, 1, optimizer=REVEALING, loss=LossConfig(name=f"{loss_file}:reinforce")),
    }.items():
        policy = updater(model_path, config)
        result[name, "metrics"] = train(policy, batch)
        result[name, "weights"] = shards_of(policy)
    careless = updater(model_path, trainer(1, 1, loss=LossConfig(name=f"{loss_file}:careless")))
    outcome("sum instead of tokens", lambda: train(careless, batch))
    result["gradients after errors"] = any(each.grad is not None for each in careless._policy.module.parameters())

    spiky = updater(model_path, trainer(1, 1, loss=LossConfig(name=f"{loss_file}:spiky")))
    result["before spike"] = shards_of(spiky)
    outcome("spike", lambda: train(spiky, batch))
    result["after spike"] = shards_of(spiky)

    schedule = OptimizerConfig(lr=1.0, warmup_steps=2, decay_ratio=0.5, min_lr_factor=0.1)
    policy = updater(model_path, trainer(1, 1, optimizer=schedule), total_steps=8)
    result["lr"] = [train(policy, one_token_batch())["lr"] for _ in range(10)]

    policy = updater(model_path, trainer(1, 1, optimizer=OptimizerConfig(lr=1e-3)))
    fresh = sampled_with(batch, logprobs_of(updater(model_path, trainer(1, 1)), batch))
    result["on-policy"] = [train(policy, fresh), train(policy, fresh)]
    return result
