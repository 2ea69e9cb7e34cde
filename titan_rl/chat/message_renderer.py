"""A renderer for policies that are asked in messages: a person at a terminal, or a demonstration.

A token stands for a whole message, so that whatever plays rollouts of tokens plays these too, with any task, whatever a
model's tokenizer could write:

    prompt  [tools, user "2*3=", …]    said  [assistant "6", END]

The first token of a prompt stands for the tools. Ids mean nothing outside of the renderer. Equal messages have equal
ones, so that a prompt has the same tokens, and its requests the same seeds, whenever it is asked.
"""

import hashlib
from collections.abc import Iterable, Sequence

from titan_rl.chat.renderer import Messages, Renderer, Tokens, Tools
from titan_rl.types import FinishReason, Message, ToolSpec

END = 0
"""The stop token."""
_MOST = 1 << 31


class MessageRenderer(Renderer):
    vocab_size = _MOST
    stop_token_ids: tuple[int, ...] = (END,)
    longest_token = _MOST

    def __init__(self) -> None:
        self._said: dict[int, Message | tuple[ToolSpec, ...]] = {END: ()}

    def render(self, messages: Messages, tools: Tools = ()) -> list[int]:
        return [self._id(tuple(tools)), *map(self._id, messages)]

    def extend(self, prompt: Tokens, completion: Tokens, messages: Messages, tools: Tools = ()) -> list[int]:
        return [self._id(message) for message in messages]

    def parse(
        self, completion: Tokens, finish_reason: FinishReason, prompt: Iterable[int] = (), tools: Tools = ()
    ) -> Message:
        return next(iter(self.messages(completion)), Message("assistant", ""))._replace(role="assistant")

    def say(self, message: Message) -> list[int]:
        return [self._id(message), END]

    def encode(self, text: str) -> list[int]:
        return [self._id(Message("user", text))]

    def decode(self, token_ids: Tokens) -> str:
        return "".join(message.content for message in self.messages(token_ids))

    def messages(self, token_ids: Iterable[int]) -> list[Message]:
        return [said for token_id in token_ids if isinstance(said := self._said[token_id], Message)]

    def tools(self, prompt: Sequence[int]) -> tuple[ToolSpec, ...]:
        first = self._said[prompt[0]]
        return () if isinstance(first, Message) else first

    def _id(self, said: Message | tuple[ToolSpec, ...]) -> int:
        number = int.from_bytes(hashlib.blake2b(repr(said).encode(errors="replace"), digest_size=4).digest()) % _MOST
        # `setdefault`, because a gateway renders in a thread of its own; an id that is taken has to give way
        while number == END or self._said.setdefault(number, said) != said:
            number = (number + 1) % _MOST
        return number
