"""Plain data that crosses process boundaries: requests, completions, rollouts, training samples.

Invariants held here and relied on everywhere above:

- A `PolicyVersion` orders all weights ever served: `(incarnation, step)`, compared in that order.
- Arrays of one completion or sample have one length; position `i` of `logprobs` and `versions` speaks about
  `token_ids[i]`. A request, completion or piece with other dtypes than it declares cannot be made.
- `loss_mask[i]` is True only for tokens that an engine sampled, and for each of them in exactly one sample, unless no
  other token was possible; only there do `logprobs` and `versions` have a meaning.

This module imports numpy, the standard library and `support` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from titan_rl.support import Supports

NO_VERSION = -1
"""Entry of a `versions` array at tokens that no policy sampled (prompt and environment tokens)."""


LARGEST_STEP = (1 << 32) - 1
"""Of a version that can be encoded; also the bits of a code that hold its step."""


class PolicyVersion(NamedTuple):
    """Which weights: ordered by incarnation first, finished RL optimizer steps second.

    A trainer restored to an earlier step starts a new incarnation, so its re-done step 7 is newer than the lost
    one. Supervised warm-up steps do not count as steps.
    """

    incarnation: int
    step: int

    def encode(self) -> int:
        """This version as one int64 that keeps the order, as in `versions` arrays. Raises ValueError if none fits."""
        if not (0 <= self.step <= LARGEST_STEP and 0 <= self.incarnation < 1 << 31):
            raise ValueError(f"incarnation {self.incarnation}, step {self.step} is no version that can be encoded")
        return (self.incarnation << 32) | self.step

    @staticmethod
    def decode(code: int) -> PolicyVersion:
        return PolicyVersion(int(code) >> 32, int(code) & LARGEST_STEP)

    def __str__(self) -> str:
        return f"v{self.step}" if self.incarnation == 0 else f"v{self.incarnation}.{self.step}"


def _require_arrays(owner: Any, dtypes: dict[str, np.dtype[Any]]) -> None:
    """Raises ValueError unless these fields are one-dimensional arrays of these dtypes and of one length, and the
    request id is a string."""
    if not isinstance(owner.request_id, str):
        raise ValueError(f"request id {owner.request_id!r} is no string")
    length = None
    for name, dtype in dtypes.items():
        array = getattr(owner, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"{owner.request_id}: {name} is {found}; a one-dimensional array of {dtype} is expected")
        if length is not None and len(array) != length:
            raise ValueError(f"{owner.request_id}: {name} has {len(array)} elements, and there are {length} tokens")
        length = len(array)
    for name in ("supports", "top_logprobs", "routes"):
        if (told := getattr(owner, name, None)) is not None and len(told) != length:
            raise ValueError(f"{owner.request_id}: {name} of {len(told)} tokens, and there are {length}")


PROMPT_ARRAYS: dict[str, np.dtype[Any]] = {"prompt_token_ids": np.dtype(np.int32)}
SAMPLED_ARRAYS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int64),
}
"""The arrays of a request, and of what was sampled for it, with their dtypes."""
TOP = np.dtype([("token", np.int32), ("logprob", np.float32)])
MOST_TOP = 20
"""Of `SamplingParams.top_logprobs`."""


class FinishReason(StrEnum):
    STOP = "stop"
    """The engine sampled a stop token; it is the last of `token_ids`."""
    LENGTH = "length"
    """`max_new_tokens` was reached."""
    ABORT = "abort"
    """Somebody aborted the request; `token_ids` holds what was sampled until then."""


class StopReason(StrEnum):
    STOP = "stop"
    """The policy ended its only turn."""
    LENGTH = "length"
    """Its only turn was cut off at `sampling.max_new_tokens`."""
    MAX_TURNS = "max_turns"
    """`rollout.max_turns` was reached."""
    TOKEN_BUDGET = "token_budget"
    """`rollout.max_sampled_tokens` were sampled."""
    CONTEXT_FULL = "context_full"
    """The model has no room for a further turn."""
    DONE = "done"
    """The environment said so, or its program returned."""
    ERROR = "error"
    """User code, or a request, failed."""
    TIMEOUT = "timeout"
    """`rollout.seconds` were over, or user code took longer than `environment` lets it."""
    ABORT = "abort"


class FailureKind(StrEnum):
    """What failed a rollout. Whichever it was, the rollout has no reward, and its group is compared without it."""

    TASK = "task"
    """Code of the environment, of its program or of a rollouter."""
    TOOL = "tool"
    GRADER = "grader"
    """A reward function, of one rollout or of its group."""
    TIMEOUT = "timeout"
    """As `StopReason.TIMEOUT`, whatever took too long."""
    REQUEST = "request"
    """A request of the policy was refused."""
    INFRASTRUCTURE = "infrastructure"
    """A process of user code died or had no memory left, or the gateway or an engine failed a request."""


EXACT_MATCH = "exact_match"
"""Name of the score that counts as exact match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Logprobs are those of the distribution that was really sampled from."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""
    min_p: float = 0.0
    """0: off."""
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    """No stop token is sampled before so many others were; its probability goes to the rest until then."""
    repetition_penalty: float = 1.0
    """Positive. Above 1, tokens of the prompt and of the completion become less likely (logits divided by it where
    positive, multiplied where negative); below 1 more likely. 1: off."""
    presence_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logits of every token that the completion holds already."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logits of a token once for each time that the completion holds it already."""
    constraint: str = ""
    """What the completion must be: a structural tag of the library xgrammar, as JSON. Each token is drawn from those
    with which it can still become that, and a stop token from the moment when it is. Empty: anything."""
    support: bool = False
    """Whether the completion says what each token was drawn from."""
    routes: bool = False
    """Whether it says which experts computed each token, if the policy is a mixture of experts."""
    top_logprobs: int = 0
    """Of so many tokens, the likeliest at each place, the completion has the logprobs too; at most `MOST_TOP`."""
    prompt_logprobs: bool = False
    """Whether it also has those of the prompt's tokens, and as many likeliest ones at each of their places. They are
    the policy's own: no other field has a part in them."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be impossible."""
        left_out = self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.min_new_tokens > 0
        return left_out or bool(self.constraint)

    @property
    def depends_on_output(self) -> bool:
        """Whether the tokens sampled so far change how the next one is drawn.

        Such a request cannot be resumed from its own tokens: an engine would see them as a prompt, which these
        options do not count or count otherwise.
        """
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return self.min_new_tokens > 0 or penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One attempt to complete one prompt. `request_id` names the attempt and is never reused."""

    request_id: str
    prompt_token_ids: np.ndarray  # [T_prompt] int32
    sampling: SamplingParams
    seed: int
    """From `seeding.request_seed`; every request has one, which the order of arrival does not decide."""
    min_version: PolicyVersion = PolicyVersion(0, 0)
    """Served only by generators that hold at least this version."""
    exact_version: PolicyVersion | None = None
    """Served only by generators that hold exactly this version, from its first token to its last."""
    sampled: int = 0
    """How many of the prompt's last tokens belong to the completion: earlier attempts sampled them."""
    session_id: str | None = None
    """Names a conversation; stable over its turns (sticky routing)."""
    routes_from: int = 0
    """With `sampling.routes`: the experts of earlier tokens of the prompt are known."""
    stream_from: int = -1
    """Negative: only the completion is asked for. Else its tokens are wanted as they are sampled too, as `Piece`s, and
    this is the first one's position in the whole completion: 0, or what earlier attempts have sampled."""

    def __post_init__(self) -> None:
        _require_arrays(self, PROMPT_ARRAYS)

    @property
    def streams(self) -> bool:
        return self.stream_from >= 0

    def allows(self, version: PolicyVersion) -> bool:
        """Whether a generator that holds this version may serve it."""
        return version == self.exact_version if self.exact_version is not None else version >= self.min_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tokens that were sampled for a request."""

    request_id: str
    token_ids: np.ndarray  # [T] int32, stop token included
    logprobs: np.ndarray  # [T] float32, of the sampled tokens after temperature and truncation
    versions: np.ndarray  # [T] int64, encoded PolicyVersion that sampled each token
    supports: Supports | None = None
    """What the T tokens were drawn from, where that was asked for. None: each from the whole vocabulary."""
    top_logprobs: np.ndarray | None = None  # [T, n] TOP, the likeliest first, n as asked for or all; None: not asked
    prompt_logprobs: np.ndarray | None = None
    """[T_prompt - 1, 1 + n] TOP, of each token of the prompt but its first: itself, then the likeliest. None: not asked
    for, or these are not the completion's first tokens."""
    routes: np.ndarray | None = None
    """[T, layers, k] int16, where that was asked for: the experts that computed the token before each of these, when
    it was sampled; -1: not known. The token's version chose them."""
    prompt_routes: np.ndarray | None = None
    """[T_prompt - 1 - routes_from, layers, k] int16, likewise of the prompt's tokens but its last, cached ones too; the
    first token's version chose them."""

    def __post_init__(self) -> None:
        _require_arrays(self, SAMPLED_ARRAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Sampled):
    finish_reason: FinishReason
    generator: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Plain numbers, named as in `metrics.metric_table`: `generation/seconds_queued`, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Sampled):
    """Some tokens of a completion, while more of it is being sampled.

    A piece may be lost or come twice; positions say what it is. The completion at the end has them all.
    """

    offset: int
    """Position of the first token in the whole completion."""

    @property
    def end(self) -> int:
        return self.offset + len(self.token_ids)

    @staticmethod
    def join(pieces: Sequence[Piece]) -> Piece:
        """Pieces that follow each other, at least one, as one."""
        if len(pieces) == 1:
            return pieces[0]
        return Piece(request_id=pieces[0].request_id, offset=pieces[0].offset, **sampled_arrays(*pieces))


def sampled_arrays(*parts: Sampled, start: int = 0, end: int | None = None) -> dict[str, Any]:
    """Tokens `start` to `end` of these parts together, as the arrays of a completion or a piece."""
    supports = Supports.join((part.supports, len(part.token_ids)) for part in parts)
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    top = np.concatenate(tops)[start:end] if tops else None
    prompt = parts[0].prompt_logprobs if parts and not start else None
    told = {"supports": supports and supports.select(slice(start, end)), "top_logprobs": top, "prompt_logprobs": prompt}
    routes = [part.routes for part in parts if part.routes is not None]
    told["routes"] = np.concatenate(routes)[start:end] if routes else None
    told["prompt_routes"] = parts[0].prompt_routes if parts and not start else None
    return told | {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(part, name) for part in parts)])[start:end]
        for name, dtype in SAMPLED_ARRAYS.items()
    }


class ToolSpec(NamedTuple):
    """A function that a policy may call, as it is declared to it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    problem: str = ""
    """Non-empty when the call could not be parsed: what is wrong with it, for the policy to read."""
    raw: str = ""
    """What the policy wrote, of a call that could not be parsed."""
    id: str = ""
    """What the tool's answer refers to, for chat formats that show it; empty where nobody gave one."""


class Message(NamedTuple):
    """One message of a conversation, as environments see it."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant calls. As many messages of role "tool" follow, in this order."""
    tool_call_id: str = ""
    """Of a tool's answer: the call's `id`; empty where it has none."""
    reasoning: str = ""
    """What an assistant thought before it answered, in chat formats that keep that apart."""
    name: str = ""
    """Of who speaks, for chat formats that show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a program finds the policy for one rollout: an OpenAI-compatible server."""

    base_url: str
    api_key: str
    """Names the rollout: whatever is asked with this key becomes part of it."""
    model: str

    def environ(self) -> dict[str, str]:
        """The variables that clients of OpenAI and of Anthropic read."""
        addresses = {"OPENAI": self.base_url, "ANTHROPIC": self.base_url.removesuffix("/v1")}
        return {
            f"{vendor}_{name}": value
            for vendor, address in addresses.items()
            for name, value in (("BASE_URL", address), ("API_KEY", self.api_key), ("MODEL", self.model))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt of a task: what the policy is shown and what the grader needs to know."""

    prompt: tuple[Message, ...]
    answer: Any = None
    """Whatever the rubric compares with; must pickle."""
    rejected: str = ""
    """An answer that is worse than the right one, for a warm-up by preferences."""


class Purpose(StrEnum):
    """What a group is for; part of every request's seed."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    DEMONSTRATE = "demonstrate"
    """Nothing is sampled: group g of n samples is the environment's demonstrations number g * n to g * n + n - 1."""


class GroupKey(NamedTuple):
    """Names one attempt to run one group."""

    purpose: Purpose
    group_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Run `samples` rollouts of one prompt."""

    group_id: int
    """The prompt's index in its stream (training stream or held-out list); texts may repeat, ids do not."""
    purpose: Purpose
    samples: int
    sampling: SamplingParams
    min_version: PolicyVersion
    exact_version: PolicyVersion | None = None
    """The only version that may sample it; None: any from `min_version` on."""
    attempt: int = 0
    """How often the group was run before under the same id, because its samples were lost."""

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.purpose, self.group_id, self.attempt)

    def __str__(self) -> str:
        again = f" attempt {self.attempt}" if self.attempt else ""
        return f"{self.purpose} group {self.group_id}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One packed document for the trainer: a rollout, or one branch of a rollout that branched."""

    group_id: int
    sample: int
    """Number within the group: that of its rollout, and for its further branches as `rollout.samples` counts."""
    token_ids: np.ndarray  # [L] int32
    loss_mask: np.ndarray  # [L] bool, True on tokens that were sampled, not forced, and are trained in no other branch
    logprobs: np.ndarray  # [L] float32, behaviour logprob of token i given tokens < i; 0 where not trained
    versions: np.ndarray  # [L] int64, NO_VERSION where not trained
    advantages: np.ndarray  # [L] float32, 0 where not trained; made of a number: all trained tokens have it
    reward: float
    supports: Supports | None = None
    """What the L tokens were drawn from. None: each from the whole vocabulary."""
    routes: np.ndarray | None = None
    """[L, layers, k] int16, the experts that computed each token when the next one was sampled; -1: not known, as of
    the last. The version of the next sampled token chose them. None: the trainer's own choice is as good."""
    unrouted: int = 0
    """Sampled tokens that are not trained because the experts of a token before them are not known."""

    @property
    def route_shape(self) -> tuple[int, int]:
        """Layers and experts of `routes`."""
        return (0, 0) if self.routes is None else self.routes.shape[1:]

    @property
    def support_bytes(self) -> int:
        return 0 if self.supports is None else self.supports.nbytes

    @property
    def advantage(self) -> float:
        """Mean over the trained tokens."""
        trained = self.advantages[self.loss_mask]
        return float(trained.mean(dtype=np.float64)) if len(trained) else 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.advantages, np.ndarray):
            object.__setattr__(self, "advantages", np.where(self.loss_mask, np.float32(self.advantages), np.float32(0)))
        arrays = (self.token_ids, self.loss_mask, self.logprobs, self.versions, self.advantages)
        routes = self.token_ids if self.routes is None else self.routes
        lengths = {len(self.supports or self.token_ids), len(routes), *map(len, arrays)}
        if len(lengths) != 1:
            raise ValueError(f"group {self.group_id} sample {self.sample}: arrays of different lengths {lengths}")
        if len(self.loss_mask) and self.loss_mask[0]:
            raise ValueError(
                f"group {self.group_id} sample {self.sample}: the first token cannot be trained, nothing precedes it"
            )
