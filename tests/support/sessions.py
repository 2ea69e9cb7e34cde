"""Programs that ask in a session, with a policy that says what a test wants."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.errors import TaskError
from titan_rl.rollout.trajectory import RolloutRequest, Trajectory
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Message,
    PolicyVersion,
    Purpose,
    SamplingParams,
    ToolSpec,
)

LENGTH = 10_000
RUN_SEED = 3
VERSION = PolicyVersion(0, 2)
ADD = ToolSpec("add", "adds", {"type": "object", "properties": {"terms": {"type": "string"}}})
UNEXTENDABLE = "9"
"""A new message of this text cannot be added without rendering the conversation again."""


class Renderer(SymbolRenderer):
    """What the policy said is rendered in other tokens than it sampled, as chat templates may."""

    def render(self, messages, tools=()):
        return super().render(
            [each._replace(content=f"8{each.content}") if each.role == "assistant" else each for each in messages],
            tools,
        )

    def extend(self, prompt, completion, messages, tools=()):
        if any(message.content == UNEXTENDABLE for message in messages):
            raise TaskError("this format would change what went before")
        return super().extend(prompt, completion, messages, tools)


def request(**options) -> RolloutRequest:
    group = GroupRequest(
        group_id=7,
        purpose=Purpose.TRAIN,
        samples=4,
        sampling=SamplingParams(max_new_tokens=50, temperature=0.7, routes=True),
        min_version=VERSION,
        exact_version=VERSION,
    )
    return RolloutRequest(
        **{"session_id": "s", "group": group, "sample": 2, "max_turns": 1000, "max_sampled_tokens": 0, **options}
    )


@dataclass
class Program:
    """Asks in one session; its policy says what the test wants. Each sampled token has a logprob of its own."""

    renderer: Renderer
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trajectory = Trajectory(request(**self.options), self.renderer, run_seed=RUN_SEED, max_model_len=LENGTH)
        self._calls = itertools.count()
        self._logprobs = itertools.count(1)

    def ask(self, messages, tools=(), *, choices=1, wanted=None) -> list[GenerationRequest]:
        prompt = self.trajectory.prompt_of_chat(messages, tools)
        return self._ask(prompt, choices, wanted)

    def ask_tokens(self, tokens, *, choices=1, wanted=None) -> list[GenerationRequest]:
        return self._ask(self.trajectory.prompt_of_tokens(tokens), choices, wanted)

    def _ask(self, prompt, choices, wanted):
        wanted = wanted or SamplingParams(max_new_tokens=40)
        return self.trajectory.ask(f"call{next(self._calls)}", [(prompt, wanted)], choices=choices)

    def sampled(self, asked: GenerationRequest, tokens: list[int], *, stopped: bool) -> Completion:
        prompt = len(asked.prompt_token_ids)
        routes = np.arange(prompt - 1 + len(tokens), dtype=np.int16)[:, None, None]  # one layer, one expert: its place
        return Completion(
            request_id=asked.request_id,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array([-next(self._logprobs) for _ in tokens], np.float32),
            versions=np.full(len(tokens), VERSION.encode(), np.int64),
            prompt_routes=routes[asked.routes_from : prompt - 1],
            routes=routes[prompt - 1 :],
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )

    def answer(self, asked: GenerationRequest, tokens: list[int], tools=(), *, stopped: bool | None = None) -> Message:
        """What the client reads."""
        stopped = bool(tokens) and tokens[-1] in self.renderer.stop_token_ids if stopped is None else stopped
        completion = self.sampled(asked, tokens, stopped=stopped)
        parsed = self.renderer.parse(tokens, completion.finish_reason, asked.prompt_token_ids, tools)
        message = parsed._replace(tool_calls=tuple(call for call in parsed.tool_calls if not call.problem))
        self.trajectory.answered(completion, message, stopped=stopped)
        return message

    def says(self, messages, text: str, tools=()) -> list[Message]:
        """One whole turn: the conversation with the answer, which ends by a stop token of its own."""
        (asked,) = self.ask(messages, tools)
        tokens = self.renderer.encode(text)
        if tokens[-1:] != [self.renderer.encode("</tool>")[0]]:
            tokens.append(self.renderer.stop_token_ids[0])
        return [*messages, self.answer(asked, tokens, tools)]


def user(text: str) -> Message:
    return Message("user", text)


def prompt_of(asked: list[GenerationRequest]) -> list[int]:
    return asked[0].prompt_token_ids.tolist()


def rendered_anew(trajectory: Trajectory) -> int:
    """Prompts that continue a sampled turn but were rendered anew."""
    return sum(turn.rendered_anew for turn in trajectory.turns)
