"""The result of a group, its report to the controller, and the texts and tokens of the few rollouts that are recorded.

- `GroupResult` stays in the worker that played the group: conversations, tokens, samples.
- `GroupReport` holds numbers and references, never tokens: its size does not depend on how much was sampled. Its
  holder owns the `samples` and releases them exactly once.
- `texts` of a recorded branch joined are its decoded text. A character of several tokens is the text of its last one.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef, to_message
from titan_rl.errors import (
    GraderFailed,
    InfrastructureFailed,
    RequestAborted,
    RequestError,
    RequestLost,
    RequestTooLong,
    TaskTimeout,
    TitanError,
    ToolFailed,
)
from titan_rl.isolation.wire import ExamplePrompt
from titan_rl.metrics.rollout_record import BranchRecord, Failed, PlainMessage, RolloutRecord, TurnRecord
from titan_rl.one_line import sendable
from titan_rl.policy.token_score_recorder import SampleName, TokenScores
from titan_rl.rollout.samples import training_samples
from titan_rl.rollout.trajectory import Trajectory
from titan_rl.types import (
    NO_VERSION,
    FailureKind,
    FinishReason,
    GroupRequest,
    Message,
    PolicyVersion,
    Purpose,
    StopReason,
    TrainingSample,
)

LONGEST_ERROR = 600
"""Characters of a rollout's error that are reported; the worker's log has all of it."""

_REPLACED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8, and so tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A finished group: its rollouts and its training samples."""

    rollouts: tuple[RolloutRecord, ...] = ()
    """In numbers. Empty for demonstrations, and where only the samples are known."""
    trajectories: tuple[Trajectory, ...] = ()
    """Of the rollouts; empty where the example could not be made."""
    samples: tuple[TrainingSample, ...] = ()
    """Empty for evaluation groups; rollouts with an error contribute none."""
    example: ExamplePrompt | None = None
    """None where the example could not be made."""
    restarts: int = 0
    """Processes of user code that died in the worker since its last result."""

    def describe(self, rollout: RolloutRecord, decode: Callable[[Sequence[int]], str], *, count: int) -> RolloutRecord:
        """A rollout of this group of `count`, with its texts and tokens as far as they are known."""
        trained = [each for each in self.samples if each.sample % count == rollout.sample]
        trajectory = next((each for each in self.trajectories if each.request.sample == rollout.sample), None)
        samples: Sequence[TrainingSample] = trained
        if not trained and trajectory is not None:
            whole = [(rollout.sample, rollout.reward, trajectory.tree)]
            samples = training_samples(rollout.group, whole, rollouts=count)
        record = msgspec.structs.replace(
            rollout,
            advantage=trained[0].advantage if trained else None,
            branches=[_branch(each, decode) for each in samples],
        )
        if trajectory is None:
            return record
        return msgspec.structs.replace(
            record,
            wanted=self.example.wanted if self.example is not None else "",
            messages=[*map(plain_message, trajectory.messages)],
            side_conversations=[[*map(plain_message, each)] for each in trajectory.side_conversations],
            turns=[
                TurnRecord(
                    request=turn.completion.request_id,
                    seed=turn.seed,
                    generator=turn.completion.generator,
                    finish=turn.completion.finish_reason.value,
                    tokens=len(turn.completion.token_ids),
                    role=turn.role,
                    reward=turn.reward,
                )
                for turn in trajectory.turns
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    group_id: int
    purpose: Purpose
    attempt: int
    rollouts: tuple[RolloutRecord, ...]
    """In numbers."""
    samples: SampleBatch
    """References; empty for evaluation groups, and when no rollout could be trained."""
    restarts: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_message, (to_message(self, _BLANK),)

    @property
    def oldest_version(self) -> int | None:
        """Smallest encoded version among the group's trained tokens; None when it has none."""
        versions = [version for version in self.samples.oldest_versions if version != NO_VERSION]
        return min(versions, default=None)

    @property
    def failures(self) -> list[Failed]:
        return [failed for each in self.rollouts if (failed := each.failed)]

    @property
    def first_error(self) -> str:
        """What failed first, and its error; empty if no rollout failed. A time-out may have waited for something else
        that failed, so it comes last."""
        failed = [each for each in self.rollouts if each.error]
        first = min(failed, key=lambda each: each.failure is FailureKind.TIMEOUT, default=None)
        return f"{first.failure}: {first.error}" if first else ""

    @property
    def rewards(self) -> set[float]:
        """The different rewards of the rollouts that were graded."""
        return {rollout.reward for rollout in self.rollouts if not rollout.error}

    @property
    def solved(self) -> bool:
        """Whether the group cannot be improved: every rollout is an exact match, with the same reward."""
        return len(self.rewards) == 1 and all(r.exact_match >= 1.0 and not r.error for r in self.rollouts)


_BLANK = msgspec.msgpack.encode(RolloutRecord(purpose=Purpose.TRAIN, group=0, sample=0))
"""Has the names of all fields. A message of a process where they are others is refused."""

_decode = msgspec.msgpack.Decoder(GroupReport).decode


def _from_message(content: bytes) -> GroupReport:
    return _decode(zlib.decompressobj(zdict=_BLANK).decompress(content))


def report_of(request: GroupRequest, result: GroupResult, refs: Sequence[SampleRef]) -> GroupReport:
    """The report of a group whose samples were stored."""
    return GroupReport(
        group_id=request.group_id,
        purpose=request.purpose,
        attempt=request.attempt,
        rollouts=tuple(
            msgspec.structs.replace(each, error=sendable(each.error[:LONGEST_ERROR])) if each.error else each
            for each in result.rollouts
        ),
        samples=SampleBatch.of(refs),
        restarts=result.restarts,
    )


def ended(group: GroupRequest, sample: int, **how: Any) -> RolloutRecord:
    of_group: dict[str, Any] = {"purpose": group.purpose, "group": group.group_id, "attempt": group.attempt}
    return RolloutRecord(**of_group, sample=sample, **how)


_FAILURES: tuple[tuple[Any, StopReason, FailureKind], ...] = (
    (TaskTimeout, StopReason.TIMEOUT, FailureKind.TIMEOUT),
    (ToolFailed, StopReason.ERROR, FailureKind.TOOL),
    (GraderFailed, StopReason.ERROR, FailureKind.GRADER),
    (InfrastructureFailed, StopReason.ERROR, FailureKind.INFRASTRUCTURE),
    (RequestAborted, StopReason.ABORT, FailureKind.INFRASTRUCTURE),
    (RequestLost, StopReason.ERROR, FailureKind.INFRASTRUCTURE),
    (RequestTooLong, StopReason.CONTEXT_FULL, FailureKind.REQUEST),
    (RequestError, StopReason.ERROR, FailureKind.REQUEST),
    (TitanError, StopReason.ERROR, FailureKind.TASK),
)
"""Why a rollout ended that an error of this class ended, and what failed. The first class that fits counts."""


def failure_of(error: TitanError) -> dict[str, Any]:
    """What a record says of a rollout that this error ended."""
    reason, failure = next(how for kind, *how in _FAILURES if isinstance(error, kind))
    return {"stop_reason": reason, "failure": failure, "error": str(error)}


def with_numbers(record: RolloutRecord, trajectory: Trajectory) -> RolloutRecord:
    """The record of a rollout that is over, with all other numbers of a report."""
    completions = [turn.completion for turn in trajectory.turns]
    return msgspec.structs.replace(
        record,
        truncated=any(turn.finish_reason is FinishReason.LENGTH for turn in trajectory.graded_last[-1:]),
        turn_count=len(completions),
        sampled_tokens=sum(len(completion.token_ids) for completion in completions),
        branch_count=trajectory.tree.leaves,
        rendered_anew=sum(turn.rendered_anew for turn in trajectory.turns),
        metrics=means(completion.metrics for completion in completions),
    )


def unplayed_rollouts(request: GroupRequest, error: TitanError) -> tuple[RolloutRecord, ...]:
    """The rollouts of a group none of which could be played."""
    return tuple(ended(request, sample, **failure_of(error)) for sample in range(request.samples))


def unplayed(request: GroupRequest, error: TitanError) -> GroupReport:
    """The report of a group none of whose rollouts could be played."""
    return report_of(request, GroupResult(rollouts=unplayed_rollouts(request, error)), ())


def means(numbers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Every number, averaged over those that have it."""
    values: dict[str, list[float]] = {}
    for each in numbers:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: sum(its) / len(its) for name, its in values.items()}


def with_scores(record: RolloutRecord, scores: Mapping[SampleName, TokenScores]) -> RolloutRecord:
    """The record with what the trainer says of the samples that were trained."""
    branches = []
    for branch in record.branches:
        if (found := scores.get((record.group, branch.sample))) is not None:
            logprobs, weights = iter(shortest(found.logprobs)), iter(shortest(found.weights))
            branch = msgspec.structs.replace(
                branch,
                trainer_logprobs=[next(logprobs) if each else None for each in branch.trained],
                weights=[next(weights) if each else 0 for each in branch.trained],
            )
        branches.append(branch)
    return msgspec.structs.replace(record, branches=branches)


def token_texts(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token; see the module."""
    texts: list[str] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = decode(pending)
        if text.endswith(_REPLACED) and len(pending) < _LONGEST_CHARACTER and len(texts) + 1 < len(token_ids):
            text = ""  # the rest of the character follows
        else:
            pending = []
        texts.append(text)
    return texts


def shortest(values: np.ndarray) -> list[float | None]:
    """float32 numbers as decimals that read back bit for bit."""
    return [value if math.isfinite(value) else None for value in map(float, values.astype(np.float32).astype(str))]


def plain_message(message: Message) -> PlainMessage:
    plain: PlainMessage = {"role": message.role, "content": message.content}
    plain |= {name: value for name in ("reasoning", "name") if (value := getattr(message, name))}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"name": call.name, "arguments": _plain(call.arguments)} | ({"raw": call.raw} if call.raw else {})
            for call in message.tool_calls
        ]
    return plain


def _plain(arguments: Any) -> Any:
    """As JSON can say it: it has no NaN."""
    return json.loads(json.dumps(arguments, default=str), parse_constant=str)


def _branch(tokens: TrainingSample, decode: Callable[[Sequence[int]], str]) -> BranchRecord:
    trained, ids = tokens.loss_mask.tolist(), tokens.token_ids.tolist()
    logprobs, versions = shortest(tokens.logprobs), tokens.versions.tolist()
    advantages = shortest(tokens.advantages) if len({*tokens.advantages[tokens.loss_mask].tolist()}) > 1 else None
    return BranchRecord(
        sample=tokens.sample,
        token_ids=ids,
        texts=token_texts(ids, decode),
        trained=[*map(int, trained)],
        logprobs=[logprob if each else None for each, logprob in zip(trained, logprobs, strict=True)],
        versions=[
            str(PolicyVersion.decode(version)) if each else "" for each, version in zip(trained, versions, strict=True)
        ],
        advantages=advantages and [value if each else None for each, value in zip(trained, advantages, strict=True)],
    )
