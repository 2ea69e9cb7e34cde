"""The turns of one rollout, whoever makes them: a rollouter in its worker, or a program through the gateway.

- What was sampled is never rendered again while a conversation goes on: the prompt is then the tokens of the call
  before, what was sampled after them, and what the renderer says that the new messages add. A conversation that its
  chat format cannot extend so is rendered anew.
- The record holds exactly what was answered, with the engine's own tokens, logprobs and versions. What was asked and
  not answered (aborted, failed) is not in it, but has used up a turn: a program that hangs up for ever comes to an end.
- No more than the rollout's turns are ever asked for, and no more than its tokens ever answered, however many calls are
  open at once: each call takes what it may need before it is sent, and gives back what it did not.
- How tokens are drawn is the run's business: temperature, truncation, penalties and seeds that a program asks for are
  not used, since the trainer's logprobs are those of the run's temperature. Where a turn ends is up to the program.

Pure: no clock, no tasks, no server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import SessionOver, TaskError
from titan_rl.generation.engine import validate_request
from titan_rl.rollout.conversations import Conversations, Place, Said
from titan_rl.seeding import request_seed
from titan_rl.types import (
    Completion,
    Endpoint,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Message,
    SamplingParams,
    StopReason,
    ToolSpec,
)

UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Which rollout, and its bounds."""

    session_id: str
    """The conversation's id (sticky routing), unique per attempt."""
    group: GroupRequest
    """Purpose, group id, least version, pinned generator and sampling of the run."""
    sample: int
    """Number within the group."""
    max_turns: int
    """Choices that the program may ask for, over all its calls."""
    max_sampled_tokens: int
    """Of all choices together; 0: no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An answer of the policy."""

    prompt_token_ids: np.ndarray  # [T] int32
    completion: Completion
    """What counts of it: cut behind the token that completed a stop text of a program's."""
    message: Message
    """As whoever asked reads it."""
    finish_reason: FinishReason
    """As whoever asked is told: a turn that a stop text ended has stopped."""
    anew: bool = False
    """Its prompt was rendered anew and could not be proven to extend what was sampled, although it goes on from there:
    the answer came back changed, or behind it stands an assistant message of the program's own, or with other tools, or
    the chat format cannot be extended. A first prompt, a fork and a history that was edited before the answer are not
    counted: a program that makes them means them. Of several choices of one prompt the first counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """All that came of a rollout's turns."""

    turns: tuple[Turn, ...] = ()
    """In the order in which they were answered."""
    messages: tuple[Message, ...] = ()
    """The conversation of the last answered call, its answer included; () if there is none."""
    refused: StopReason | None = None
    """Which bound of the rollout first refused a call."""
    failure: str = ""
    """Non-empty: an engine failed a call, which is not the program's fault."""

    @property
    def rendered_anew(self) -> int:
        return sum(turn.anew for turn in self.turns)


class RolloutGateway(Protocol):
    """The gateway, as rollout workers see it."""

    async def open(self, request: RolloutRequest) -> Endpoint:
        """Begin a session: where the program finds the policy, and its key."""
        ...

    async def idle(self, session_id: str, seconds: float) -> None:
        """Returns once the session has had no open call for so many seconds (also: since it was opened)."""
        ...

    async def close(self, session_id: str) -> RolloutRecord:
        """End it: open calls are aborted, the key is refused from now on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """What one or several choices are to go on from."""

    token_ids: np.ndarray  # [T] int32
    messages: tuple[Message, ...] = ()
    """What they say."""
    place: Place | None = None
    """Of a chat: where its messages stand."""
    anew: bool = False
    """Counts as rendered anew."""


def first_prompt(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
    """The prompt of a conversation nothing of which was sampled. Rollouts may share it."""
    place = Conversations().place(messages, tools)
    token_ids = np.asarray(renderer.render(messages, tools), dtype=np.int32)
    return Prompt(token_ids=token_ids, messages=tuple(messages), place=place)


@lru_cache(maxsize=1024)
def _limited(sampling: SamplingParams, tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """One object per distinct value: requests that share theirs travel for less."""
    return replace(sampling, max_new_tokens=tokens, stop_token_ids=stop_token_ids)


class _Open(NamedTuple):
    """A choice that was asked for and not answered."""

    prompt: Prompt
    number: int
    """Among the choices of its prompt."""
    tokens: int
    """That it may sample."""


class Turns:
    """What was asked and answered so far.

    `prompt_of_chat` and `prompt_of_tokens` change nothing, so another thread than that of the other methods may call
    them.
    """

    def __init__(self, request: RolloutRequest, renderer: Renderer, *, run_seed: int, max_model_len: int) -> None:
        self.request = request
        self._renderer = renderer
        self._run_seed = run_seed
        self._max_model_len = max_model_len or UNBOUNDED
        self._conversations = Conversations()
        self.asked = 0
        """Turns that were asked for."""
        self._sampled = 0
        self._open: dict[str, _Open] = {}
        self._turns: list[Turn] = []
        self._anew: set[Prompt] = set()  # of which an answer was recorded
        self._last: Prompt | None = None
        self._messages: tuple[Message, ...] = ()
        self._refused: StopReason | None = None
        self._failure = ""
        self._over = False

    def prompt_of_chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        """The tokens of a conversation, which extend what was sampled in it where that can be proven.

        Raises:
            TaskError: the renderer cannot write the messages or the tools.
        """
        place = self._conversations.place(messages, tools)
        token_ids = self._extended(place, messages, tools)
        anew = token_ids is None and place.goes_on
        if token_ids is None:
            token_ids = np.asarray(self._renderer.render(messages, tools), dtype=np.int32)
        return Prompt(token_ids=token_ids, messages=tuple(messages), place=place, anew=anew)

    def prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt:
        """Tokens as they are; graders see them as a user's message."""
        said = Message("user", self._renderer.decode(token_ids))
        return Prompt(token_ids=np.asarray(token_ids, dtype=np.int32), messages=(said,))

    def ask(
        self, call_id: str, prompts: Sequence[tuple[Prompt, SamplingParams]], *, choices: int
    ) -> list[GenerationRequest]:
        """What to send for a call: the choices of the first prompt, then those of the second, …

        Args:
            call_id: never used before; request ids begin with it.
            prompts: with what the program asks for, of which only `max_new_tokens` and `stop_token_ids` are heard.
            choices: of each prompt.

        Raises:
            SessionOver: there are not so many turns left, or no tokens, or the session was closed.
            RequestError: no engine can serve it. Nothing of the call was counted.
        """
        total = len(prompts) * choices
        self._refused = self._refused or next(filter(None, (self.exhausted(prompt) for prompt, _ in prompts)), None)
        share = self._share(total)
        group = self.request.group
        requests: list[GenerationRequest] = []
        open_calls: dict[str, _Open] = {}
        for prompt, wanted in prompts:
            room = max(1, self._max_model_len - len(prompt.token_ids))
            tokens = min(wanted.max_new_tokens, group.sampling.max_new_tokens, room, share)
            stops = tuple(dict.fromkeys((*group.sampling.stop_token_ids, *wanted.stop_token_ids)))
            sampling = _limited(group.sampling, tokens, stops)
            for number in range(choices):
                turn = self.asked + len(requests)
                request = GenerationRequest(
                    request_id=f"{call_id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    seed=request_seed(self._run_seed, group.purpose, group.group_id, self.request.sample, turn),
                    min_version=group.min_version,
                    session_id=self.request.session_id,
                    pinned_to=group.pinned_to,
                )
                validate_request(request, max_model_len=self._max_model_len, vocab_size=self._renderer.vocab_size)
                requests.append(request)
                open_calls[request.request_id] = _Open(prompt, number, tokens)
        self.asked += total
        self._open.update(open_calls)
        return requests

    def exhausted(self, prompt: Prompt) -> StopReason | None:
        """Why nothing more can be asked for, after this prompt; None where something can."""
        if self.asked >= self.request.max_turns:
            return StopReason.MAX_TURNS
        if self.request.max_sampled_tokens and self._sampled >= self.request.max_sampled_tokens:
            return StopReason.TOKEN_BUDGET
        if len(prompt.token_ids) >= self._max_model_len:
            return StopReason.CONTEXT_FULL
        return None

    def answered(self, completion: Completion, message: Message, *, stopped: bool) -> Turn:
        """A choice is handed to whoever asked.

        Args:
            completion: what counts of it.
            message: what the program reads.
            stopped: it is told that the policy ended its turn, or a stop text did.

        Raises:
            SessionOver: the session was closed meanwhile.
        """
        if self._over:
            raise SessionOver("the rollout has ended")
        prompt, number, _ = self._open.pop(completion.request_id)
        self._sampled += len(completion.token_ids)
        turn = Turn(
            prompt_token_ids=prompt.token_ids,
            completion=completion,
            message=message,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            anew=prompt.anew and prompt not in self._anew,
        )
        self._turns.append(turn)
        self._anew.add(prompt)
        if prompt.place is not None:
            self._conversations.remember(prompt.place, message, Said(prompt.token_ids, completion.token_ids))
        if prompt is not self._last or number == 0:  # of several choices programs go on with the first
            self._last, self._messages = prompt, (*prompt.messages, message)
        return turn

    def dropped(self, request_ids: Iterable[str]) -> None:
        """These will not be answered, if they were not: what they did not use is free again."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def failed(self, failure: str) -> None:
        """An engine failed a call. The first failure is recorded."""
        if not self._over:
            self._failure = self._failure or failure

    def close(self) -> RolloutRecord:
        """All that came of it; nothing can be added any more."""
        self._over = True
        return RolloutRecord(
            turns=tuple(self._turns),
            messages=self._messages,
            refused=self._refused,
            failure=self._failure,
        )

    def _extended(self, place: Place, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> np.ndarray | None:
        """What was sampled and what the new messages add; None where no tokens are proven to be that."""
        if place.said is None:
            return None
        before, sampled = place.said
        try:
            added = self._renderer.extend(before.tolist(), sampled.tolist(), messages[place.known :], tools)
        except TaskError:  # this chat format would change what went before
            return None
        return np.concatenate((before, sampled, np.asarray(added, dtype=np.int32)))

    def _share(self, choices: int) -> int:
        """Tokens that each of so many choices may sample at most."""
        if self._over:
            raise SessionOver("the rollout has ended")
        most = self.request.max_turns
        if self.asked + choices > most:
            raise SessionOver(f"{choices} more completions after {self.asked} are more than the rollout's {most} turns")
        if not self.request.max_sampled_tokens:
            return UNBOUNDED
        free = self.request.max_sampled_tokens - self._sampled - sum(each.tokens for each in self._open.values())
        if free < choices:
            taken = " or promised to calls that are open" if self._open else ""
            raise SessionOver(f"the rollout's {self.request.max_sampled_tokens} tokens are sampled{taken}")
        return free // choices
