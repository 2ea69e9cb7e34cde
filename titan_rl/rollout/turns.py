"""Bookkeeping for the turns of one rollout, played by a rollouter in its worker or by a program through the gateway.

- While a conversation continues, sampled tokens are never rendered again. The next prompt is the previous prompt, the
  tokens sampled after it, and the tokens that the renderer adds for the new messages. If the chat format does not allow
  that, the conversation is rendered anew.
- The record contains exactly the answered calls, with the engine's own tokens, logprobs and versions. A call that was
  aborted or failed is not recorded, but uses up a turn: a program that keeps hanging up comes to an end.
- The seed of a call follows from its prompt and the number of equal prompts before it, so calls that are open at once
  may come and be answered in any order.
- The limits on turns and sampled tokens hold however many calls are open at once: each call reserves what it may need
  before it is sent, and returns what it did not use.
- The run decides how tokens are drawn. A program's temperature, truncation, penalties and seeds are ignored, because
  the trainer computes logprobs at the run's temperature. The program may decide where a turn ends.

Pure: no clock, no tasks, no server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import RolloutOver, TaskError
from titan_rl.generation.engine import validate_request
from titan_rl.rollout.conversations import Conversations, Place, Prompt, extends
from titan_rl.seeding import prompt_digest, request_seed
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
    """Which rollout to play, and its limits."""

    session_id: str
    """The conversation's id (sticky routing), unique per attempt."""
    group: GroupRequest
    """Purpose, group id, least version, pinned generator and sampling of the run."""
    sample: int
    """Number within the group."""
    max_turns: int
    """Choices that the program may request, over all its calls."""
    max_sampled_tokens: int
    """Limit for all choices together; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An answer of the policy."""

    prompt_token_ids: np.ndarray  # [T] int32
    completion: Completion
    """Without the tokens after a stop text that the program asked for."""
    message: Message
    """As the caller reads it."""
    finish_reason: FinishReason
    """As the caller is told: a turn that ended with a stop text counts as stopped."""
    seed: int = 0
    """Of its request."""
    anew: bool = False
    """Whether the prompt continues a sampled turn but had to be rendered anew, because it could not be proven to extend
    the sampled tokens. That happens if the program changed the answer, added an assistant message of its own, changed
    the tools, or if the chat format cannot be extended. First prompts, forks and histories edited before the answer do
    not count, because programs make them on purpose. Of several choices of one prompt only the first counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """The result of a rollout's turns."""

    turns: tuple[Turn, ...] = ()
    """In the order in which they were answered."""
    messages: tuple[Message, ...] = ()
    """The conversation of the last answered call, with its answer; () if there is none."""
    side_conversations: tuple[tuple[Message, ...], ...] = ()
    """The other ones, for people to read: before an edit of the history, of a sub-agent, with another choice."""
    refused: StopReason | None = None
    """The limit that first refused a call; None if none did."""
    failure: str = ""
    """Non-empty if an engine failed a call, which is not the program's fault."""
    misread: str = ""
    """Non-empty if the gateway could not read an answer, which is not the program's fault either: its rollout fails,
    and nothing else, because another play would sample the same answer."""


class RolloutGateway(Protocol):
    """The gateway's interface for rollout workers."""

    async def open(self, request: RolloutRequest) -> Endpoint:
        """Open a session; returns the policy's address and the session's key, for the program."""
        ...

    async def idle(self, session_id: str, seconds: float) -> None:
        """Return once the session has had no open call for `seconds`, counted from its opening if it never had one."""
        ...

    async def close(self, session_id: str) -> RolloutRecord:
        """Close the session: abort its open calls and refuse its key from now on.

        Raises:
            RequestLost, ActorGone: the rollout is lost and is to be played again.
        """
        ...


@lru_cache(maxsize=1024)
def _shared(sampling: SamplingParams) -> SamplingParams:
    """One object per distinct value, because shared objects make messages smaller."""
    return sampling


class _Open(NamedTuple):
    """A choice that was requested and is not answered yet."""

    prompt: Prompt
    number: int
    """Index among the choices of its prompt."""
    tokens: int
    """Tokens that it may sample."""
    seed: int


class Turns:
    """The requested and answered turns of one rollout.

    `prompt_of_chat` and `prompt_of_tokens` may be called from other threads than the other methods.
    """

    def __init__(self, request: RolloutRequest, renderer: Renderer, *, run_seed: int, max_model_len: int) -> None:
        self.request = request
        self._renderer = renderer
        self._run_seed = run_seed
        self._max_model_len = max_model_len or UNBOUNDED
        self._conversations = Conversations()
        self.asked = 0
        """Number of requested turns."""
        self._asked_of: Counter[str] = Counter()  # the same, by the digest of the prompt
        self._sampled = 0
        self._open: dict[str, _Open] = {}
        self._turns: list[Turn] = []
        self._anew: set[Prompt] = set()  # prompts with a recorded answer
        self._last: Prompt | None = None
        self._messages: tuple[Message, ...] = ()
        self._ended: list[tuple[Message, ...]] = []  # conversations that no later one extends
        self._refused: StopReason | None = None
        self._failure = self._misread = ""
        self._over = False

    def prompt_of_chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
        """The prompt of a conversation. It extends the tokens sampled before if that can be proven; if not, it is
        rendered.

        Raises:
            TaskError: the renderer cannot write the messages or the tools.
        """
        place = self._conversations.place(messages, tools)
        token_ids = self._extended(place, messages, tools)
        anew = token_ids is None and place.goes_on
        if token_ids is None:
            token_ids = np.asarray(self._renderer.render(messages, tools), dtype=np.int32)
        return Prompt(token_ids=token_ids, messages=tuple(messages), tools=tools, place=place, anew=anew)

    def prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt:
        """A prompt of these exact tokens. Graders see them as a user's message."""
        said = Message("user", self._renderer.decode(token_ids))
        return Prompt(token_ids=np.asarray(token_ids, dtype=np.int32), messages=(said,))

    def ask(
        self, call_id: str, prompts: Sequence[tuple[Prompt, SamplingParams]], *, choices: int
    ) -> list[GenerationRequest]:
        """The generation requests of a call: the choices of the first prompt, then those of the second, …

        Args:
            call_id: a new id; request ids begin with it.
            prompts: each with the program's sampling options, of which only `max_new_tokens` and `stop_token_ids` are
                used.
            choices: number of choices per prompt.

        Raises:
            RolloutOver: too few turns or tokens are left, or the session was closed.
            RequestError: no engine can serve it. The call uses up no turns.
        """
        total = len(prompts) * choices
        self._refused = self._refused or next(filter(None, (self.exhausted(prompt) for prompt, _ in prompts)), None)
        share = self._share(total)
        group = self.request.group
        requests: list[GenerationRequest] = []
        open_calls: dict[str, _Open] = {}
        asked_of = self._asked_of.copy()
        for prompt, wanted in prompts:
            known = prompt.servable.get((wanted, share))
            sampling = known or self._limited(prompt, wanted, share)
            digest = prompt_digest(prompt.token_ids)
            for number in range(choices):
                request = GenerationRequest(
                    request_id=f"{call_id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    seed=request_seed(
                        self._run_seed, group.purpose, group.group_id, self.request.sample, digest, asked_of[digest]
                    ),
                    min_version=group.min_version,
                    exact_version=group.exact_version,
                    session_id=self.request.session_id,
                    pinned_to=group.pinned_to,
                )
                if known is None:
                    validate_request(request, max_model_len=self._max_model_len, vocab_size=self._renderer.vocab_size)
                requests.append(request)
                asked_of[digest] += 1
                open_calls[request.request_id] = _Open(prompt, number, sampling.max_new_tokens, request.seed)
            if known is None:
                prompt.servable[wanted, share] = sampling
        self.asked, self._asked_of = self.asked + total, asked_of
        self._open.update(open_calls)
        return requests

    def exhausted(self, prompt: Prompt) -> StopReason | None:
        """The limit that keeps this prompt from being completed; None if there is none."""
        if self.asked >= self.request.max_turns:
            return StopReason.MAX_TURNS
        if self.request.max_sampled_tokens and self._sampled >= self.request.max_sampled_tokens:
            return StopReason.TOKEN_BUDGET
        if len(prompt.token_ids) >= self._max_model_len:
            return StopReason.CONTEXT_FULL
        return None

    def answered(self, completion: Completion, message: Message, *, stopped: bool) -> Turn:
        """Record a choice that is about to be handed to the caller.

        Args:
            completion: without tokens after a stop text.
            message: what the caller reads.
            stopped: whether a stop token or a stop text ended the turn.

        Raises:
            RolloutOver: the session was closed meanwhile.
        """
        if self._over:
            raise RolloutOver("the rollout has ended")
        prompt, number, _, seed = self._open.pop(completion.request_id)
        self._sampled += len(completion.token_ids)
        turn = Turn(
            prompt_token_ids=prompt.token_ids,
            completion=completion,
            message=message,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            seed=seed,
            anew=prompt.anew and prompt not in self._anew,
        )
        self._turns.append(turn)
        self._anew.add(prompt)
        if prompt.tools is not None:
            self._conversations.remember(prompt, message, completion.token_ids)
        conversation = (*prompt.messages, message)
        self._ended = [*(each for each in self._ended if not extends(conversation, each)), conversation]
        if prompt is not self._last or number == 0:  # programs continue with the first of several choices
            self._last, self._messages = prompt, conversation
        return turn

    def dropped(self, request_ids: Iterable[str]) -> None:
        """Requests that are still unanswered will not be answered: free their reserved tokens."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def failed(self, failure: str) -> None:
        """Record that an engine failed a call. Only the first failure is kept."""
        if not self._over:
            self._failure = self._failure or failure

    def misread(self, problem: str) -> None:
        """Record that an answer could not be read. Only the first problem is kept."""
        if not self._over:
            self._misread = self._misread or problem

    def close(self) -> RolloutRecord:
        """End the rollout's turns and return their record. Nothing can be added after that."""
        self._over = True
        return RolloutRecord(
            turns=tuple(self._turns),
            messages=self._messages,
            side_conversations=tuple(each for each in self._ended if each is not self._messages),
            refused=self._refused,
            failure=self._failure,
            misread=self._misread,
        )

    def _extended(self, place: Place, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> np.ndarray | None:
        """The known tokens extended by those of the new messages; None if they cannot be proven to extend."""
        if place.said is None:
            return None
        before, sampled = place.said
        try:
            added = self._renderer.extend(before.tolist(), sampled.tolist(), messages[place.known :], tools)
        except TaskError:  # this chat format would change earlier tokens
            return None
        return np.concatenate((before, sampled, np.asarray(added, dtype=np.int32)))

    def _limited(self, prompt: Prompt, wanted: SamplingParams, share: int) -> SamplingParams:
        """What a prompt's requests are sampled with."""
        sampling = self.request.group.sampling
        room = max(1, self._max_model_len - len(prompt.token_ids))
        tokens = min(wanted.max_new_tokens, sampling.max_new_tokens, room, share)
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *wanted.stop_token_ids)))
        return _shared(replace(sampling, max_new_tokens=tokens, stop_token_ids=stops))

    def _share(self, choices: int) -> int:
        """Most tokens that each of `choices` choices may sample."""
        if self._over:
            raise RolloutOver("the rollout has ended")
        most = self.request.max_turns
        if self.asked + choices > most:
            raise RolloutOver(f"{choices} more completions after {self.asked} are more than the rollout's {most} turns")
        if not self.request.max_sampled_tokens:
            return UNBOUNDED
        free = self.request.max_sampled_tokens - self._sampled - sum(each.tokens for each in self._open.values())
        if free < choices:
            taken = " or promised to calls that are open" if self._open else ""
            raise RolloutOver(f"the rollout's {self.request.max_sampled_tokens} tokens are sampled{taken}")
        return free // choices
