"""Everything one trainer rank does, without actors: `warm_up_step`, `train_step`, its shards, saving.

Every public method is collective, unless it says otherwise: all ranks call the same methods in the same order with the
same batch, or with their shares of it. They return the same on every rank, except `local_shards`.

A step changes the weights completely or not at all: samples, loss and gradients are looked at, on all ranks, before
the optimizer runs. Where a step is several optimizer steps (`trainer.epochs`, `trainer.minibatches`), all samples are
there before the first; if a later one fails, the weights are neither saved nor trained again.

The weights after a step do not depend (beyond rounding) on the number of ranks or on the packing, because losses are
summed and divided once, by the global number of trained tokens of an optimizer step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleSource, SharedMemorySource
from titan_rl.errors import StorageError, TrainingError, WeightsError
from titan_rl.metrics.timeline import timeline
from titan_rl.policy.algorithms.base import TrainedTokens, later_sums, probability_ratio
from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.critic import Critic
from titan_rl.policy.losses import Objective, build_loss, kl_penalty
from titan_rl.policy.microbatch import MicroBatch, RankSamples
from titan_rl.policy.models import checkpoint
from titan_rl.policy.models.architecture import read_shape
from titan_rl.policy.models.titan_adaptation import choose_device, join_ranks
from titan_rl.policy.packing import MiniBatch, PackingPlan, plan_step
from titan_rl.policy.preferences import Preferences
from titan_rl.policy.state_copies import StateCopies
from titan_rl.policy.step_metrics import StepMetrics, logprob_alarm
from titan_rl.policy.token_score_recorder import TokenScoreRecorder
from titan_rl.policy.training_state import CRITIC, MOMENTS, REFERENCE, WEIGHTS, StateWriter, read_state
from titan_rl.types import LARGEST_STEP, PolicyVersion
from titan_rl.weights.manifest import TIED, TensorShard

if TYPE_CHECKING:
    from titan_rl.policy.models.model import Policy
    from titan_rl.policy.optimizer import PolicyOptimizer

WARM_UP_TEMPERATURE = 1.0
"""Of the cross entropy, whatever RL samples with: the demonstrations are taught to the policy as it is."""

_log = logging.getLogger(__name__)


def import_torchtitan(device: str) -> None:
    """Import what computes the policy. torchtitan's modules copy the device when they are imported."""
    choose_device(device)
    import titan_rl.policy.models.model
    import titan_rl.policy.optimizer  # noqa: F401


def _shards_of(tensors: Mapping[str, Tensor]) -> list[TensorShard]:
    """This rank's, empty ones left out."""
    return [shard for name, tensor in tensors.items() if (shard := checkpoint.local_shard(name, tensor)).data.numel()]


def _data(shards: Sequence[TensorShard]) -> list[Tensor]:
    return [shard.data for shard in shards]


class PolicyUpdater:
    """The policy, its optimizer and its loss on one rank.

    Attributes:
        step: RL steps, of a batch each, that are over.
        incarnation: with `step`, the version that on-policy tokens carry.
        aliases: `(name, stored name)` of tensors that share another's storage.
        samples: where batches by reference are fetched from.
        microbatches: how many it has computed; another thread may look while a step goes on.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model_path: Path,
        temperature: float,
        total_steps: int,
        device: str,
        seed: int,
        architecture: str = "",
    ) -> None:
        """Load the policy and shard it. Needs the environment of `join_world`. Raises ConfigError: a checkpoint, loss
        or parallelism that cannot be.

        Args:
            model_path: a checkpoint directory in Hugging Face format.
            temperature: above 0, what the engines sample with; logprobs and entropies are taken at it.
            total_steps: length of the learning-rate schedule; after it lr keeps its last value.
            seed: of the process's random numbers (the bundled losses draw none).
            architecture: a family that is not bundled.
        """
        self._loss: Objective = build_loss(config.loss)
        shape = read_shape(model_path, architecture)
        shape.check_tensor_parallel("trainer.tensor_parallel", config.tensor_parallel)
        self._device = join_ranks(config.ranks, device)
        import_torchtitan(device)
        from titan_rl.policy.models.model import build_policy
        from titan_rl.policy.optimizer import PolicyOptimizer

        torch.use_deterministic_algorithms(config.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # never read
        torch.manual_seed(seed)
        self._config = config
        self._source = model_path
        self.samples: SampleSource = SharedMemorySource()
        self._temperature = temperature
        self._policy = build_policy(shape, config, self._device)
        checkpoint.load_weights(self._policy, model_path)
        self._shards = _shards_of(self._policy.tensors)
        self._marks: list[TensorShard] = []  # of a state of adapters: what they belong to
        if config.lora.r:
            checkpoint.reset_adapters(self._policy, seed)
            base = checkpoint.base_fingerprint(self._shards)
            mark = f"adapters of base {base:x} with lora_alpha {config.lora.lora_alpha:g}"
            self._marks = [TensorShard.whole(mark, torch.tensor(0))]
        self._optimizer = PolicyOptimizer(config.optimizer, self._policy.module, total_steps)
        self._critic = Critic(config, shape.dim, self._device) if config.critic.coefficient else None
        self._reference: Policy | None = None
        self._teacher = Path(config.kl.teacher) if config.kl.teacher else None
        self._warm_up: PolicyOptimizer | None = None
        self._preferences: Preferences | None = None  # of a warm-up by pairs
        self._warm_up_steps = 0
        self._recorder = TokenScoreRecorder()
        self._total_steps = total_steps
        self.step = 0
        self.incarnation = 0
        self.microbatches = 0
        self._writer = StateWriter(dist.get_rank())
        self._torn = False
        self.aliases = TIED if shape.tied else ()

    def plan(self, batch: SampleBatch) -> PackingPlan:
        return plan_step(batch, self._config)

    def warm_up_step(self, batch: SampleBatch, plan: PackingPlan) -> dict[str, float]:
        """One supervised step on demonstrations: cross entropy of their responses, or DPO. No policy version.

        The first call makes an optimizer of its own, the first `train_step` throws it away. Of a demonstration, only
        token ids, loss mask and which one of a pair it is are used. Raises as `train_step`; also when RL has begun, or
        `trainer.warmup.steps` is 0.
        """
        from titan_rl.policy.optimizer import warm_up_optimizer

        if self.step:
            raise TrainingError(f"a warm-up step was asked for after {self.step} RL steps")
        if not self._config.warmup.steps:
            raise TrainingError("a warm-up step was asked for, but trainer.warmup.steps is 0")
        if self._warm_up is None:
            self._warm_up = warm_up_optimizer(self._config.warmup, self._policy.module)
            if self._config.warmup.dpo_beta:
                self._preferences = Preferences(self._policy, self._config, temperature=WARM_UP_TEMPERATURE)
        metrics = self._optimize(batch, plan, self._warm_up, warm_up=True)
        self._warm_up_steps += 1
        names = ("loss", "preferred", "grad_norm", "lr", "trained_tokens", "tokens", "imbalance")
        return {name: metrics[name] for name in names if name in metrics}

    def freeze_reference(self) -> None:
        """Compare the policy from now on with its weights as they are now, or with the teacher: the KL term of the
        loss. Raises TrainingError if `trainer.kl.coefficient` is 0."""
        from titan_rl.policy.models.model import frozen_policy

        if not self._config.kl.coefficient:
            raise TrainingError("there is no reference policy to freeze: trainer.kl.coefficient is 0")
        self._reference = self._warm_up = self._preferences = None  # their memory goes before the next one's is taken
        self._reference = frozen_policy(self._policy, self._config, self._teacher)
        if self._teacher is not None:
            checkpoint.load_weights(self._reference, self._teacher)

    def train_step(
        self, batch: SampleBatch, plan: PackingPlan, recorder: TokenScoreRecorder | None = None
    ) -> dict[str, float]:
        """Train a batch, and count one step; every rank computes its own part. Returns the metrics `train/…`.

        Args:
            batch: all samples of the step, or this rank's (`PackingPlan.share`).
            recorder: collects scores of those of this rank's samples that it names.

        Raises:
            SamplesLost: samples are missing or damaged (on all ranks; the weights are untouched).
            TrainingError: NaN or inf in loss or gradient, or an engine beyond `trainer.logprob_alarm.stop_mean` (on all
                ranks; the weights are untouched, unless the message names optimizer steps), a batch with no trained
                token, a sample that is too long, or a KL term without a reference.
        """
        if self._config.kl.coefficient and self._reference is None:
            raise TrainingError("the KL term has no reference: freeze_reference was not called")
        self._warm_up = self._preferences = None
        self._recorder = recorder or TokenScoreRecorder()
        metrics = self._optimize(batch, plan, self._optimizer, warm_up=False)
        self.step += 1
        return metrics

    def local_shards(self) -> Sequence[TensorShard]:
        """This rank's parts of the live float32 weights, by Hugging Face name; tied tensors once (see `aliases`). With
        LoRA: the adapters as they are published, whole on every rank."""
        if self.base is None:
            return self._shards
        whole = {name: checkpoint.whole_tensor(tensor) for name, tensor in self._policy.trained.items()}
        return [TensorShard.whole(*each) for each in checkpoint.scaled(whole, self._config.lora).items()]

    @property
    def base(self) -> Sequence[TensorShard] | None:
        """With LoRA: this rank's parts of the weights that it adapts."""
        return self._shards if self._config.lora.r else None

    def save_hf(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint in the compute dtype; returns on every rank when it is there. Raises
        StorageError, on all ranks, if rank 0 could not write it, TrainingError as `begin_save`."""
        self._raise_if_torn()
        try:
            checkpoint.save_whole(directory, self._source, self._policy.trained, self._config)
        except WeightsError as error:
            raise StorageError(f"step {self.step}: {error}") from error

    def begin_save(self, directory: Path) -> None:
        """Copy in memory all that later steps depend on, and begin to write it to `directory`; `finish_save` waits.
        Raises StorageError where it cannot be written, TrainingError where there is nothing whole to save."""
        if not self.step:
            raise TrainingError("there is nothing to save before the first step")
        self._raise_if_torn()
        step = TensorShard.whole("step", torch.tensor(self.step))
        self._writer.begin([*self._state, *self._frozen(), *self._marks, step], directory)

    def _raise_if_torn(self) -> None:
        if self._torn:
            raise TrainingError(f"the optimizer failed in the middle of step {self.step}: its weights are not saved")

    def finish_save(self) -> None:
        """Wait until it is written, in any thread; not collective. Raises StorageError if it could not be written."""
        self._writer.finish()

    def restore(self, directory: Path, incarnation: int) -> None:
        """Go on from the state in `directory`, of any layout of ranks, as this incarnation. Raises CheckpointError if
        it cannot be read, or is of another policy."""
        if self._config.kl.coefficient:
            self.freeze_reference()
        step = torch.tensor(0)
        read_state([*self._state, *self._frozen(), *self._marks, TensorShard.whole("step", step)], directory)
        self.step, self.incarnation, self._torn = int(step), incarnation, False
        self._optimizer.set_step(self.step)

    def copy_state(self, copies: StateCopies, *, reference: bool = False) -> None:
        """Copy all that later steps depend on; `reference`: the reference policy too, which no step changes. Not
        collective. Raises StorageError if there is no room."""
        frozen = self._frozen() if reference else []
        copies.write(PolicyVersion(self.incarnation, self.step), _data(self._state), _data(frozen))

    def restore_from_copies(self, copies: StateCopies, version: PolicyVersion) -> None:
        """Go on from this version's copies, as ranks of the same layout made them. Raises CheckpointError as `read`."""
        if self._config.kl.coefficient:
            self.freeze_reference()
        copies.read(version, _data(self._state), _data(self._frozen()))
        self.step, self.incarnation = version.step, version.incarnation
        self._optimizer.set_step(version.step)

    @cached_property
    def _state(self) -> list[TensorShard]:
        """This rank's part of all that steps change, which stays where it is."""
        critic = self._critic.tensors if self._critic else {}
        parts = {WEIGHTS: self._policy.trained, MOMENTS: self._optimizer.tensors, CRITIC: critic}
        return _shards_of({of + name: tensor for of, part in parts.items() for name, tensor in part.items()})

    def _frozen(self) -> list[TensorShard]:
        """Of the reference, if a file does not have it."""
        frozen = {} if self._reference is None or self._teacher else self._reference.trained
        return _shards_of({REFERENCE + name: tensor for name, tensor in frozen.items()})

    def _optimize(
        self, batch: SampleBatch, plan: PackingPlan, optimizer: PolicyOptimizer, *, warm_up: bool
    ) -> dict[str, float]:
        """One step of RL, which may be several optimizer steps, or of the warm-up."""
        what = f"warm-up step {self._warm_up_steps}" if warm_up else f"step {self.step}"
        trained, longest = plan.trained_tokens, plan.longest
        if self._torn:
            raise TrainingError(f"{what}: the one before failed in its middle; restore a whole state first")
        if not trained:
            raise TrainingError(f"{what}: none of the batch's {plan.samples} samples has a trained token")
        if longest > (positions := self._policy.shape.max_length):
            raise TrainingError(f"{what}: a sample has {longest} tokens, the policy has {positions} positions")
        policy, reference = self._policy, not warm_up and self._reference is not None
        if policy.experts and plan.unrouted is None and not warm_up:
            raise TrainingError(f"{what}: trainer.replay_routes is on, and a sample does not say which experts it had")
        data_rank, tensor_rank = divmod(dist.get_rank(), policy.dims.tp)
        metrics = StepMetrics(counted=tensor_rank == 0, reference=reference)
        minibatches = (MiniBatch(plan.rounds, plan.samples, trained),) if warm_up else plan.minibatches
        preferences, critic = (self._preferences, None) if warm_up else (None, self._critic)
        summands = plan.samples // 2 if preferences else trained
        divisors = [summands] if warm_up else [self._loss.divisor(each) for each in minibatches]
        epochs = 1 if warm_up else self._config.epochs
        tensor_group = policy.dims.get_mesh("tp").get_group() if policy.dims.tp_enabled else None
        samples = RankSamples(self.samples, batch, plan, data_rank=data_rank, tensor_group=tensor_group)
        rounds = samples.microbatches(policy.device, share=policy.shares_prompts, multiple=policy.multiple)
        parts: list[Iterable[MicroBatch]] = [rounds]
        alarmed = False
        judge = preferences or critic
        if several := epochs * len(minibatches) > 1 or judge is not None or (reference and self._config.kl.in_reward):
            held = [self._with_proximal(each, warm_up=warm_up) for each in rounds]
            samples.raise_if_lost(what)
            held = judge.judged(held, counted=metrics.counted) if judge else held
            parts = [[held.pop(0) for _ in range(each.rounds)] for each in minibatches]
        norms: list[float] = []
        for number in range(epochs * len(parts)):
            divisor = divisors[number % len(parts)]
            try:
                for microbatch in parts[number % len(parts)]:
                    loss = self._round_loss(microbatch, plan, metrics, warm_up=warm_up, first=number < len(parts))
                    timeline.doing("backward")
                    (loss / divisor).backward()
                    self.microbatches += 1
                if not several:
                    samples.raise_if_lost(what)
                timeline.doing("optimizer")
                norms.append(optimizer.clip_gradients())
                finite = critic is None or critic.reduce_gradient()
                metrics.reduce_sums(norms[-1], gradient_finite=finite and math.isfinite(norms[-1]))
                done = f"{number} optimizer steps of its batch were made" if number else "the weights were not changed"
                if not metrics.finite:
                    raise TrainingError(f"{what}: {metrics.describe_failure()}; {done}")
                if not warm_up and not number:
                    alarmed = self._disagrees_with_engine(*metrics.engine_difference)
            except Exception:
                optimizer.discard_gradients()
                if critic is not None:
                    critic.discard_gradient()
                raise
            self._torn = True  # while some weights may be those after the step and others not
            lr = optimizer.step(metrics.kl, last=number + 1 == epochs * len(parts))
            if critic is not None:
                critic.step()
        self._torn = False
        return metrics.report(divisor=epochs * sum(divisors)) | {
            "grad_norm": sum(norms) / len(norms),
            "lr": lr,
            "logprob_alarm": float(alarmed),
            "trained_tokens": float(trained),
            "tokens": float(plan.tokens),
            "imbalance": plan.imbalance,
            **({"unrouted_tokens": float(plan.unrouted or 0)} if policy.experts else {}),
            **(judge.metrics if judge else {}),
        }

    def _with_proximal(self, microbatch: MicroBatch, *, warm_up: bool) -> MicroBatch:
        timeline.doing("forward")
        self.microbatches += 1
        temperature = WARM_UP_TEMPERATURE if warm_up else self._temperature
        logprobs, hidden = self._policy.logprobs(microbatch, temperature=temperature)
        values = self._critic.values(hidden).detach() if self._critic and not warm_up else None
        advantages, kl = microbatch.advantages, self._config.kl
        if kl.in_reward and self._reference is not None and not warm_up:
            reference, _ = self._reference.logprobs(microbatch, temperature=temperature)
            ratio = probability_ratio(logprobs, microbatch.behaviour_logprobs)
            costs = kl_penalty(kl.estimator, logprobs, reference, ratio)
            advantages = advantages - kl.coefficient * later_sums(costs, microbatch.samples)
        return replace(microbatch, advantages=advantages, proximal_logprobs=logprobs, values=values)

    def _disagrees_with_engine(self, mean: float, outside: float) -> bool:
        """Whether trainer and generators do, the same on every rank; raises TrainingError where that is fatal."""
        if self._config.parity == "bitwise" and mean:
            raise TrainingError(
                f"step {self.step}: trainer.parity is bitwise, and tokens that this very version sampled have other "
                f"logprobs than in the generators, by {mean:.3g} nats on average; the weights were not changed "
                "(scripts/first_difference.py says from which layer and operation on)"
            )
        warning, fatal = logprob_alarm(self._config.logprob_alarm, mean, outside)
        if fatal:
            raise TrainingError(f"step {self.step}: {warning}; the weights were not changed")
        if warning and dist.get_rank() == 0:
            _log.warning("step %d: %s", self.step, warning)
        return bool(warning)

    def _round_loss(
        self, microbatch: MicroBatch, plan: PackingPlan, metrics: StepMetrics, *, warm_up: bool, first: bool
    ) -> Tensor:
        """The summed loss of one micro-batch, for the `first` time or again; where nothing is trained, a zero that
        still has a gradient."""
        timeline.doing("forward")
        temperature = WARM_UP_TEMPERATURE if warm_up else self._temperature
        # Every rank takes part in every forward pass, also with nothing to train.
        reference_logprobs = None
        if not warm_up and self._reference is not None:
            reference_logprobs, _ = self._reference.logprobs(microbatch, temperature=self._temperature)
        logprobs, entropies, hidden = self._policy.scores(microbatch, temperature=temperature)
        if not len(microbatch.rows):
            return logprobs.sum()
        before = logprobs.detach() if microbatch.proximal_logprobs is None else microbatch.proximal_logprobs
        if first:
            self._recorder.watch(microbatch.documents, logprobs, before)
        loss_metrics: dict[str, Tensor] = {}
        if warm_up:
            loss = -(logprobs * microbatch.advantages if self._preferences else logprobs).sum()
        else:
            tokens = TrainedTokens(
                logprobs=logprobs,
                entropies=entropies,
                behaviour_logprobs=microbatch.behaviour_logprobs,
                advantages=microbatch.advantages,
                samples=microbatch.samples,
                proximal_logprobs=microbatch.proximal_logprobs,
                advantage_mean=0.0 if self._critic else plan.advantage_mean,  # a critic's are standardized
                advantage_std=1.0 if self._critic else plan.advantage_std,
                progress=self.step / self._total_steps,
            )
            loss, loss_metrics = self._loss(tokens)
            if reference_logprobs is not None and not self._config.kl.in_reward:
                penalty = kl_penalty(self._config.kl.estimator, logprobs, reference_logprobs, tokens.ratio)
                loss = loss + self._config.kl.coefficient * self._loss.total(penalty, tokens)
            if self._critic is not None:
                loss = loss + self._loss.total(self._critic.losses(microbatch, hidden), tokens)
        metrics.add(
            loss=loss.detach(),
            loss_metrics=loss_metrics,
            entropies=entropies.detach(),
            log_ratio=logprobs.detach() - microbatch.behaviour_logprobs,
            log_ratio_before=before - microbatch.behaviour_logprobs,
            # of whatever incarnation: all that sampled at this step had these weights
            on_policy=((microbatch.versions & LARGEST_STEP) == self.step) & first,
            reference_log_ratio=None if reference_logprobs is None else logprobs.detach() - reference_logprobs,
        )
        return loss
