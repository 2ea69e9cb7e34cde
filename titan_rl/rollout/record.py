"""Which rollouts are recorded, and what a line of RUN/rollouts.jsonl says about one.

    worker:      `conversation`   messages, turns and branches with their tokens, built only of chosen rollouts
    trainer:     `TokenScores`    logprobs and loss weights of every trained token
    controller:  `record`         both, with the numbers of the report

- The choice follows from the step's number and its reports, in the order of the batch: a deterministic run records the
  same rollouts again.
- All lists of a branch have the length of its `token_ids`. `logprobs`, `trainer_logprobs` and `weights` are of trained
  tokens only: null, and 0 for weights, everywhere else. A rollout that was not trained (of an evaluation, or failed)
  has null in the place of the last two lists; its sampled tokens count as `trained`.
- Numbers that came as float32 are the shortest decimal that reads back as the same float32. What is not finite is null.
- `texts` of a branch joined are its decoded text. A character of several tokens is the text of its last one.

A group that was finished before a run went on from a checkpoint has no messages and turns: a checkpoint keeps tokens.

Pure.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from titan_rl.observability.conversation import parts_of
from titan_rl.one_line import one_line
from titan_rl.policy.kept_tokens import SampleName, TokenScores
from titan_rl.rollout.report import GroupReport, GroupResult, Rollout, RolloutReport, report_of
from titan_rl.rollout.samples import training_samples
from titan_rl.sandbox.wire import LONGEST_SHOWN
from titan_rl.seeding import derive_seed
from titan_rl.types import FinishReason, GroupRequest, Message, PolicyVersion, TrainingSample

Record = dict[str, Any]

BEST, WORST, RANDOM, WRONG, RIGHT = "best", "worst", "random", "wrong", "right"
"""Why a rollout is recorded: of a step, and of an evaluation."""

MOST_WRONG, MOST_SHOWN = 2, 3
"""Rollouts of an evaluation that are recorded: the first wrong ones, and with them the first right ones."""

_REPLACED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8, and so tokens."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rollout that is recorded, and why."""

    report: GroupReport
    rollout: RolloutReport
    kept: tuple[str, ...]

    @property
    def name(self) -> SampleName:
        """Of the rollout; its samples are `sample_names`."""
        return self.report.group_id, self.rollout.sample

    @property
    def sample_names(self) -> list[SampleName]:
        count = len(self.report.rollouts)
        samples = (ref.sample for ref in self.report.samples.refs)
        return [(self.report.group_id, sample) for sample in samples if sample % count == self.rollout.sample]


def choose(step: int, reports: Sequence[GroupReport], each: int) -> list[Chosen]:
    """The `each` best and worst rollouts of a step, and as many random ones, which may have failed. Of equal rewards
    the first is best, and the last is worst."""
    everyone = [(report, rollout) for report in reports for rollout in report.rollouts]
    numbers = range(len(everyone))
    graded = [number for number in numbers if not everyone[number][1].error]
    falling = sorted(graded, key=lambda number: -everyone[number][1].reward)
    drawn = random.Random(derive_seed("recorded rollouts", step)).sample(numbers, min(each, len(numbers)))
    kept: dict[int, list[str]] = {}
    for why, some in ((BEST, falling[:each]), (WORST, falling[::-1][:each]), (RANDOM, drawn)):
        for number in some:
            kept.setdefault(number, []).append(why)
    return [Chosen(*everyone[number], tuple(why)) for number, why in kept.items()]


def choose_evaluated(reports: Sequence[GroupReport]) -> list[Chosen]:
    """The first wrong and the first right ones."""
    graded = [(report, rollout) for report in reports for rollout in report.rollouts if not rollout.error]
    wrong = [Chosen(*each, (WRONG,)) for each in graded if each[1].exact_match < 1][:MOST_WRONG]
    right = [Chosen(*each, (RIGHT,)) for each in graded if each[1].exact_match >= 1]
    return [*wrong, *right[: MOST_SHOWN - len(wrong)]]


def conversation(result: GroupResult, sample: int, decode: Callable[[Sequence[int]], str], *, rollouts: int) -> Record:
    """What only the worker knows about rollout number `sample` of a group of so many rollouts."""
    rollout = next((each for each in result.rollouts if each.sample == sample), Rollout(sample=sample))
    trained = [each for each in result.samples if each.sample % rollouts == sample]
    played = trained or training_samples(result.group_id, [rollout], [0.0], rollouts=rollouts)
    return {
        "advantage": trained[0].advantage if trained else None,
        "wanted": result.asked.wanted if result.asked is not None else "",
        "messages": [*map(plain_message, rollout.messages)],
        "side_conversations": [[*map(plain_message, each)] for each in rollout.side_conversations],
        "turns": [
            {
                "request": completion.request_id,
                "seed": seed,
                "generator": completion.generator,
                "finish": completion.finish_reason.value,
                "tokens": len(completion.token_ids),
            }
            for completion, seed in zip(rollout.graph.completions, rollout.seeds, strict=False)
        ],
        "branches": [_branch(each, decode) for each in played],
    }


def record(step: int, chosen: Chosen, said: Record, scores: Mapping[SampleName, TokenScores]) -> Record:
    """One line.

    Args:
        step: that trained the rollout, or of the version that was evaluated.
        said: the `conversation`.
        scores: of the samples that were trained.
    """
    report, rollout = chosen.report, chosen.rollout
    branches = [
        branch | _scored(branch["trained"], scores.get((report.group_id, branch["sample"])))
        for branch in said["branches"]
    ]
    return {
        "step": step,
        "purpose": report.purpose.value,
        "group": report.group_id,
        "attempt": report.attempt,
        "sample": rollout.sample,
        "kept": [*chosen.kept],
        "reward": _finite(rollout.reward),
        "reward_parts": {name: _finite(value) for name, value in rollout.reward_parts.items()},
        "exact_match": _finite(rollout.exact_match),
        "advantage": said["advantage"],
        "stop_reason": rollout.stop_reason.value,
        "error": rollout.error,
        "wanted": said["wanted"],
        "messages": said["messages"],
        "side_conversations": said["side_conversations"],
        "turns": said["turns"],
        "branches": branches,
    }


def records_of(request: GroupRequest, result: GroupResult, decode: Callable[[Sequence[int]], str]) -> list[Record]:
    """All rollouts of a group that no run played."""
    report = report_of(request, result, ())
    return [
        record(0, Chosen(report, each, ()), conversation(result, each.sample, decode, rollouts=request.samples), {})
        for each in report.rollouts
    ]


def transcript(record: Record) -> str:
    """A record of an evaluation in one line."""
    messages = record["messages"]
    prompt = [*takewhile(lambda message: message["role"] != "assistant", messages)]
    verdict, said = record["kept"][0], _in_one_line(messages[len(prompt) :])
    cut = " (cut off)" if record["turns"] and record["turns"][-1]["finish"] == FinishReason.LENGTH else ""
    wanted = f", wanted '{record['wanted']}'" if record["wanted"] and verdict == WRONG else ""
    return f"{verdict}  '{_in_one_line(prompt)}' → '{said}'{cut}{wanted}, reward {record['reward']:.3f}"


def token_texts(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token; see above."""
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
    return [_finite(float(text)) for text in values.astype(np.float32).astype(str)]


def _branch(sample: TrainingSample, decode: Callable[[Sequence[int]], str]) -> Record:
    trained, ids = sample.loss_mask.tolist(), sample.token_ids.tolist()
    numbers = zip(trained, shortest(sample.logprobs), sample.versions.tolist(), strict=True)
    logprobs, versions = [], []
    for is_trained, logprob, version in numbers:
        logprobs.append(logprob if is_trained else None)
        versions.append(str(PolicyVersion.decode(version)) if is_trained else "")
    return {
        "sample": sample.sample,
        "token_ids": ids,
        "texts": token_texts(ids, decode),
        "trained": [*map(int, trained)],
        "logprobs": logprobs,
        "trainer_logprobs": None,
        "weights": None,
        "versions": versions,
    }


def _scored(trained: Sequence[int], scores: TokenScores | None) -> Record:
    if scores is None:
        return {}
    logprobs, weights = iter(shortest(scores.logprobs)), iter(shortest(scores.weights))
    return {
        "trainer_logprobs": [next(logprobs) if each else None for each in trained],
        "weights": [next(weights) if each else 0 for each in trained],
    }


def plain_message(message: Message) -> Record:
    """As a record has it."""
    plain: Record = {"role": message.role, "content": message.content}
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


def _in_one_line(messages: Sequence[Record]) -> str:
    texts = []
    for message in messages:
        role = f"{message['role']}: " if len(messages) > 1 else ""
        texts.append(role + " ".join(text for text, _ in parts_of(message)))
    return one_line("  ".join(texts), LONGEST_SHOWN)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
