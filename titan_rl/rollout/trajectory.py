"""One rollout: its turns, messages, budgets and seeds, played in a worker or by a program through the gateway.

- While a conversation continues, sampled tokens are never rendered again. The next prompt is the previous prompt, the
  tokens sampled after it, and the tokens that the renderer adds for the new messages. If the chat format does not allow
  that, the conversation is rendered anew.
- A trajectory contains exactly the answered calls, with the engine's own tokens, logprobs and versions. A call that was
  aborted or failed is no turn of it, but uses up a turn: a program that keeps hanging up comes to an end.
- The seed of a call follows from its prompt and the number of equal prompts before it, so calls that are open at once
  may come and be answered in any order.
- The limits on turns and sampled tokens hold however many calls are open at once: each call reserves what it may need
  before it is sent, and returns what it did not use.
- The run decides how tokens are drawn. A program's temperature, truncation, penalties and seeds are ignored, because
  the trainer computes logprobs at the run's temperature. The program may decide where a turn ends.

Two messages are equal if their role, text and tool calls (name and arguments) are equal: clients drop or invent other
fields, such as ids and reasoning. Where an echo kept these, they say which of several equal turns it is. Pure: no
clock, no tasks, no server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import RolloutOver, TaskError
from titan_rl.generation.engine import validate_request
from titan_rl.rollout.samples import TokenTree, Turn
from titan_rl.seeding import prompt_digest, request_seed
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Message,
    Purpose,
    SamplingParams,
    StopReason,
    ToolSpec,
)

UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Which rollout to play, and its limits."""

    session_id: str
    """The conversation's id (sticky routing), unique per attempt."""
    group: GroupRequest
    """Purpose, group id, least or exact version, and sampling of the run."""
    sample: int
    """Number within the group."""
    max_turns: int
    """Choices that may be requested, over all calls."""
    max_sampled_tokens: int
    """Limit for all choices together; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """The prompt of one or several choices."""

    token_ids: np.ndarray  # [T] int32
    messages: tuple[Message, ...] = ()
    """The same prompt as messages."""
    tools: Sequence[ToolSpec] | None = None
    """Of a chat. None: it is no chat, and no conversation can go on from it."""
    digest: bytes = b""
    """Of a chat's messages, as `_digests` counts; empty: not computed."""
    rendered_anew: bool = False
    """As `Turn.rendered_anew`, for the first of its choices."""
    known: int = 0
    """Of its first tokens the turns before say which experts computed them."""
    token_digests: dict[SamplingParams, str] = field(default_factory=dict)
    """`prompt_digest` by the sampling with which engines can serve it. Rollouts of a group share their first prompt."""


def first_prompt(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
    """The prompt of a conversation without sampled turns. Rollouts may share it."""
    token_ids = np.asarray(renderer.render(messages, tools), dtype=np.int32)
    return Prompt(token_ids=token_ids, messages=tuple(messages), tools=tools)


class _Open(NamedTuple):
    """A choice that was requested and is not answered yet."""

    prompt: Prompt
    number: int
    """Index among the choices of its prompt."""
    tokens: int
    """Tokens that it may sample."""
    seed: int
    role: str


class _Answer(NamedTuple):
    prompt: Prompt
    number: int
    turn: Turn


class Trajectory:
    """A rollout so far. Pickled, it is what was answered, and nothing more can be asked.

    `prompt_of_chat` and `prompt_of_tokens` may be called from one other thread than the other methods.
    """

    def __init__(self, request: RolloutRequest, renderer: Renderer, *, run_seed: int, max_model_len: int) -> None:
        """`max_model_len`: longest prompt + completion in tokens; 0: unknown."""
        self.request = request
        self.turns: list[Turn] = []
        """In the order in which they were answered; of a closed session, in one that chance has no part in."""
        self.messages: list[Message] = []
        """The conversation that is graded. Whoever plays the rollout extends it; of a closed session it is that of the
        last answered call, with its answer."""
        self.side_conversations: list[tuple[Message, ...]] = []
        """The other ones, for people to read: before an edit of the history, of a sub-agent, with another choice. Of a
        session they are known when it is closed."""
        self.refused: StopReason | None = None
        """The limit that first refused a call; None if none did."""
        self.failure = ""
        """Non-empty if an engine failed a call, which is not the program's fault."""
        self.misread = ""
        """Non-empty if the gateway could not read an answer, which is not the program's fault either: its rollout
        fails, and nothing else, because another play would sample the same answer."""
        self.over = False
        self.requested = 0
        """Number of requested turns."""
        self._renderer = renderer
        self._run_seed = run_seed
        self._max_model_len = max_model_len or UNBOUNDED
        self._equal_prompts: dict[str, int] = {}  # number of requests by the digest of the prompt
        self._sampled = 0
        self._open: dict[str, _Open] = {}
        self._answers: list[_Answer] = []  # as they came
        self._digested = 0  # of them; most conversations have one turn: digested for the next one
        self._graded: Turn | None = None  # of a closed session, with which the graded conversation ends
        self._prompts: set[bytes] = set()  # digests of the messages of answered calls
        # by digest of the tools, and of the messages with the answer: the last one, and each as its client may know it
        self._prior: dict[tuple[bytes | str, ...], Turn] = {}

    def __getstate__(self) -> dict[str, Any]:
        names = ("request", "turns", "messages", "side_conversations", "refused", "failure", "misread", "requested")
        return {name: getattr(self, name) for name in (*names, "_graded")} | {"over": True}

    @cached_property
    def tree(self) -> TokenTree:
        """The tokens of all turns, to be read when the rollout is over. Shorter prompts come first: else a longer one
        could hold, as given, what was sampled after them, and `Prompt.known` would count what nobody tells."""
        return TokenTree(sorted(self.turns, key=lambda turn: len(turn.prompt_token_ids)))

    @property
    def graded_last(self) -> list[Turn]:
        """The turns, but that with which the graded conversation ends is the last."""
        return sorted(self.turns, key=lambda turn: turn is self._graded) if len(self.turns) > 1 else self.turns

    def prompt_of_chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        """The prompt of a conversation. It extends the tokens sampled before if that can be proven; if not, it is
        rendered. Raises TaskError: the renderer cannot write the messages or the tools."""
        self._digest_turns()
        digests = _digests(messages)
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        known = answers[-1] + 1 if answers else 0
        said = (_digest_of_tools(tools), digests[known])
        prior = self._prior.get((*said, *map(_known_as, messages[known - 1 : known])), self._prior.get(said))
        token_ids: np.ndarray | None = None
        routed = 0
        if prior is not None:
            before, sampled = prior.prompt_token_ids, prior.completion.token_ids
            with suppress(TaskError):  # this chat format would change earlier tokens
                added = self._renderer.extend(before.tolist(), sampled.tolist(), messages[known:], tools)
                token_ids = np.concatenate((before, sampled, np.asarray(added, dtype=np.int32)))
                routed = len(before) + len(sampled) - 1
        rendered_anew = token_ids is None and any(digests[number] in self._prompts for number in answers)
        if token_ids is None:
            token_ids = np.asarray(self._renderer.render(messages, tools), dtype=np.int32)
        return Prompt(
            token_ids=token_ids,
            messages=tuple(messages),
            tools=tools,
            digest=digests[-1],
            rendered_anew=rendered_anew,
            known=routed,
        )

    def prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt:
        """A prompt of these exact tokens. Graders see them as a user's message."""
        text = Message("user", self._renderer.decode(token_ids))
        return Prompt(token_ids=np.asarray(token_ids, dtype=np.int32), messages=(text,))

    def ask(
        self, call_id: str, prompts: Sequence[tuple[Prompt, SamplingParams]], *, choices: int, role: str = ""
    ) -> list[GenerationRequest]:
        """The generation requests of a call: the choices of the first prompt, then those of the second, …

        Args:
            call_id: a new id; request ids begin with it.
            prompts: each with the program's sampling options, of which only `max_new_tokens`, `stop_token_ids`,
                `constraint` and both kinds of logprobs are used.
            choices: number of choices per prompt.
            role: whose turns they are.

        Raises:
            RolloutOver: too few turns or tokens are left, or the session was closed.
            RequestError: no engine can serve it. The call uses up no turns.
        """
        limits = [self.exhausted(prompt) for prompt, _ in prompts]
        self.refused = self.refused or next(filter(None, limits), None)
        share = self._share(len(prompts) * choices)
        group = self.request.group
        requests: list[GenerationRequest] = []
        open_choices: dict[str, _Open] = {}
        equal_prompts = self._equal_prompts.copy()
        for prompt, wanted in prompts:
            room = max(1, self._max_model_len - len(prompt.token_ids))
            sampling = _sampling(group.sampling, wanted, min(room, share), group.purpose is Purpose.TRAIN)
            known = prompt.token_digests.get(sampling)
            digest = known or prompt_digest(prompt.token_ids)
            for number in range(choices):
                repeat = equal_prompts.get(digest, 0)
                request = GenerationRequest(
                    request_id=f"{call_id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    seed=request_seed(
                        self._run_seed, group.purpose, group.group_id, self.request.sample, digest, repeat
                    ),
                    min_version=group.min_version,
                    exact_version=group.exact_version,
                    session_id=self.request.session_id,
                    routes_from=prompt.known if sampling.routes else 0,
                )
                if not (known or number):  # the others differ by id and seed only
                    validate_request(request, max_model_len=self._max_model_len, vocab_size=self._renderer.vocab_size)
                    prompt.token_digests[sampling] = digest
                requests.append(request)
                equal_prompts[digest] = repeat + 1
                open_choices[request.request_id] = _Open(prompt, number, sampling.max_new_tokens, request.seed, role)
        self.requested, self._equal_prompts = self.requested + len(requests), equal_prompts
        self._open.update(open_choices)
        return requests

    def exhausted(self, prompt: Prompt) -> StopReason | None:
        """The limit that keeps this prompt from being completed; None if there is none. Raises RolloutOver if the
        session was closed."""
        if self.over:
            raise RolloutOver("the rollout has ended")
        if self.requested >= self.request.max_turns:
            return StopReason.MAX_TURNS
        if self.request.max_sampled_tokens and self._sampled >= self.request.max_sampled_tokens:
            return StopReason.TOKEN_BUDGET
        if len(prompt.token_ids) >= self._max_model_len:
            return StopReason.CONTEXT_FULL
        return None

    def answered(self, completion: Completion, message: Message, *, stopped: bool) -> Turn:
        """Add a choice that is about to be handed to the caller. Raises RolloutOver: the session was closed meanwhile.

        Args:
            completion: without tokens after a stop text.
            message: what the caller reads.
            stopped: whether a stop token or a stop text ended the turn.
        """
        if self.over:
            raise RolloutOver("the rollout has ended")
        prompt, number, _, seed, role = self._open.pop(completion.request_id)
        self._sampled += len(completion.token_ids)
        turn = Turn(
            prompt_token_ids=prompt.token_ids,
            completion=completion,
            message=message,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            seed=seed,
            rendered_anew=prompt.rendered_anew and all(prompt is not each.prompt for each in self._answers),
            role=role,
        )
        self.turns.append(turn)
        self._answers.append(_Answer(prompt, number, turn))
        return turn

    def dropped(self, request_ids: Iterable[str]) -> None:
        """Requests that are still unanswered will not be answered: free their reserved tokens."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def record_failure(self, failure: str = "", *, misread: str = "") -> None:
        """An engine failed a call, or the gateway could not read an answer. Only the first of each is kept."""
        if not self.over:
            self.failure, self.misread = self.failure or failure, self.misread or misread

    def close(self) -> Trajectory:
        """End a session, to which nothing can be added after that; returns this trajectory."""
        self.over = True
        ends: list[tuple[Message, ...]] = []  # conversations that no later one extends
        last: Prompt | None = None
        graded: tuple[Message, ...] = ()
        for prompt, number, turn in self._answers:
            conversation = (*prompt.messages, turn.message)
            ends = [*(each for each in ends if not extends(conversation, each)), conversation]
            if prompt is not last or number == 0:  # programs continue with the first of several choices
                last, graded, self._graded = prompt, conversation, turn
        self.messages = [*graded]
        self.side_conversations = [each for each in ends if each is not graded]
        # Which of several open calls is answered first is chance, and must not decide how the rollout is trained. What
        # goes on with an answer has a longer prompt.
        self.turns.sort(key=lambda turn: (len(turn.prompt_token_ids), turn.seed))
        return self

    def _digest_turns(self) -> None:
        while self._digested < len(self._answers):
            prompt, _, turn = self._answers[self._digested]
            self._digested += 1
            if prompt.tools is None:
                continue
            digest = prompt.digest or _digests(prompt.messages)[-1]
            self._prompts.add(digest)
            said = (_digest_of_tools(prompt.tools), _digest(digest, _meaning(turn.message)))
            self._prior[said] = self._prior[*said, _known_as(turn.message)] = turn

    def _share(self, choices: int) -> int:
        """Most tokens that each of `choices` choices may sample."""
        most = self.request.max_turns
        if self.requested + choices > most:
            raise RolloutOver(f"{choices} more completions after {self.requested} are more than its {most} turns")
        if not self.request.max_sampled_tokens:
            return UNBOUNDED
        free = self.request.max_sampled_tokens - self._sampled - sum(each.tokens for each in self._open.values())
        if free < choices:
            promised = " or promised to calls that are open" if self._open else ""
            raise RolloutOver(f"the rollout's {self.request.max_sampled_tokens} tokens are sampled{promised}")
        return free // choices


def extends(longer: Sequence[Message], shorter: Sequence[Message]) -> bool:
    """Whether a conversation goes on with all messages of another one."""
    if len(longer) <= len(shorter):
        return False
    pairs = zip(longer, shorter, strict=False)
    return all(one is other or _meaning(one) == _meaning(other) for one, other in pairs)


@lru_cache(maxsize=1024)  # one object for equal requests makes their message smaller
def _sampling(run: SamplingParams, wanted: SamplingParams, most: int, trained: bool) -> SamplingParams:
    """What a run and a program want, and at most so many tokens."""
    tokens = min(wanted.max_new_tokens, run.max_new_tokens, most)
    stops = tuple(dict.fromkeys((*run.stop_token_ids, *wanted.stop_token_ids)))
    theirs = {name: getattr(wanted, name) for name in ("constraint", "top_logprobs", "prompt_logprobs")}
    sampling = replace(run, max_new_tokens=tokens, stop_token_ids=stops, **theirs)
    return replace(sampling, support=trained and sampling.truncates)


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Of the first 0, 1, 2, … messages. Raises TaskError if a call's arguments are nested too deeply."""
    digests = [b""]
    for message in messages:
        digests.append(_digest(digests[-1], _meaning(message)))
    return digests


def _digest_of_tools(tools: Sequence[ToolSpec]) -> bytes:
    return _digest(b"", [list(tool) for tool in tools])


def _meaning(message: Message) -> list[Any]:
    return [message.role, message.content, [[call.name, call.arguments] for call in message.tool_calls]]


def _known_as(message: Message) -> str:
    """What else an echo may give back of an answer: the ids of its calls, or its reasoning."""
    return " ".join(call.id for call in message.tool_calls) or message.reasoning


def _digest(before: bytes, added: list[Any]) -> bytes:
    """Digest of a list that is extended by `added`; `before` is its digest without that."""
    try:
        text = json.dumps(added, sort_keys=True)
    except RecursionError as error:
        raise TaskError("the arguments of a tool call are nested too deeply") from error
    return hashlib.blake2b(before + text.encode(), digest_size=20).digest()
