"""The text of a completion that its client may read, while it is being sampled and after.

The deltas of a choice and its `rest`, joined, are exactly the content of the complete choice. So text that later tokens
might change is held back:

- half a character (the bytes so far decode to U+FFFD), and text that may be the beginning of a stop text;
- in a chat, text that may be the beginning of a tool call or of thinking, and trailing white space, which a chat format
  may strip. From the first such mark on, all text is held back until the renderer has parsed the whole turn.

    tokens  "Hi ", "<too", "l_call>{…"    stop text "!"
    deltas  "Hi",  "",     "",            rest: " …", or nothing when the call is read as one

Each token costs the decoding of a few, however long the completion is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.gateway.calls import Call, Chat, Choice, Delta
from titan_rl.gateway.responses import ApiError
from titan_rl.types import Completion, FinishReason, GenerationRequest, Message, Piece

LOWEST_LOGPROB = -9999.0
"""JSON has neither infinity nor NaN; OpenAI's API uses this value for infinity."""
HALF = "\ufffd"
"""What bytes that are no character (yet) decode to."""

LONGEST_MARK = 80
"""Characters of a mark such as `<tool_call>`; what is longer is text."""

_THINK = r"</?(?:think|thinking|reasoning)>"
_CALL = r"<[^<>\s]{0,80}(?:tool|call|func|invoke|arg|think|\||｜)[^<>\s]{0,80}>|\[/?[A-Z]+(?:_[A-Z]+)+\]"
_MARK = re.compile(f"(?P<think>{_THINK})|{_CALL}", re.IGNORECASE)
_MARK_BEGINS = re.compile(rf"(?:<[^<>\s]{{0,{LONGEST_MARK}}}|\[/?[A-Za-z_]{{0,{LONGEST_MARK}}})\Z")

READ_EACH = 256
"""A turn without content so far is parsed again at each piece while it has at most this many tokens. A longer turn is
parsed when it has grown by a sixteenth, or when a mark was closed."""


class TextSoFar:
    """The text of tokens as they come."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # the first token that is decoded again, so that the next ones are not at a text's beginning
        self._done = 0  # tokens whose text is sure
        self.sure = ""
        """Text that later tokens cannot change."""

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    def whole(self) -> str:
        """All text, including the part that may still change."""
        return (
            self.sure
            + self._decode(self._tokens[self._context :])[len(self._decode(self._tokens[self._context : self._done])) :]
        )

    def add(self, tokens: Iterable[int]) -> None:
        self._tokens += tokens
        known = self._decode(self._tokens[self._context : self._done])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(HALF) or len(text) <= len(known):
            return
        self.sure += text[len(known) :]
        self._context, self._done = self._done, len(self._tokens)


class TextDeltas:
    """The deltas of one choice."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str] = (),
        content: Callable[[Sequence[int]], str] | None = None,
        calls: bool = False,
    ) -> None:
        """
        Args:
            decode: text of tokens.
            stops: texts that end the completion.
            content: of a chat: what is content in a turn of these tokens that was cut off here. None: all text is.
            calls: whether the policy may call tools, in some formats by a turn that is nothing but JSON.
        """
        self._text = TextSoFar(decode)
        self._stops = stops
        self._content = content
        self._calls = calls
        self._given: list[str] = []
        self._begin: int | None = None if content is not None else 0  # where in the text the content begins
        self._at = 0  # up to where it was given out; with `_begin`
        self._searched = 0  # for stop texts
        self._scanned = 0  # for marks
        self._mark: int | None = None  # nothing from here on is given out before the end
        self._read_at = 0  # tokens, when the turn was read last
        self.ended = False
        """A stop text was found: what is sampled from here on is not part of the answer."""

    @property
    def tokens(self) -> list[int]:
        """All that were added."""
        return self._text.tokens

    def add(self, tokens: Sequence[int]) -> str:
        """Tokens were sampled; no stop token is among them. Returns what may be read now, perhaps nothing."""
        if self.ended:
            return ""
        before = len(self._text.sure)
        self._text.add(tokens)
        text = self._text.sure
        limit = self._limit(text)
        if self._content is None:
            return self._give(text, limit)
        begin = self._begin
        if begin is None:
            begin = self._find_begin(text, closes_a_mark=any(end in text[before:] for end in ">]"))
        limit = min(limit, self._first_mark(text, begin))
        if begin is None:
            return ""
        limit = begin + len(text[begin:limit].rstrip())
        if limit <= begin or (self._calls and text[begin] in "{["):
            return ""
        if self._begin is None:  # for good: what was given out is not taken back
            self._begin = self._at = begin
        return self._give(text, limit)

    def rest(self, content: str) -> str:
        """What is still to be read of the complete answer's content.

        Raises:
            ApiError: the content does not begin with the text that was sent: this class does not know the chat format
                well enough.
        """
        given = "".join(self._given)
        if not content.startswith(given):
            raise ApiError(500, "the complete turn reads otherwise than what was streamed of it", code="internal_error")
        return content[len(given) :]

    def _give(self, text: str, limit: int) -> str:
        if limit <= self._at:
            return ""
        delta = text[self._at : limit]
        self._at = limit
        self._given.append(delta)
        return delta

    def _limit(self, text: str) -> int:
        """Length of the text before the first possible beginning of a stop text."""
        limit = len(text)
        for stop in self._stops:
            found = text.find(stop, max(0, self._searched - len(stop)))
            if found >= 0:
                self.ended = True
                limit = min(limit, found)
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    limit = min(limit, len(text) - length)
                    break
        self._searched = len(text)
        return limit

    def _find_begin(self, text: str, *, closes_a_mark: bool) -> int | None:
        """Where the content begins, as the renderer reads the turn so far."""
        assert self._content is not None
        count = len(self._text.tokens)
        if count > READ_EACH and count < self._read_at * 17 // 16 and not closes_a_mark:
            return None
        self._read_at = count
        whole = self._text.whole()
        said = self._content(self._text.tokens).rstrip()
        begin = len(whole.rstrip()) - len(said)
        return begin if said and begin < len(text) and whole.rstrip().endswith(said) else None

    def _first_mark(self, text: str, begin: int | None) -> int:
        """Length of the text before the first possible beginning of a mark. Thinking before the content does not
        count."""
        if self._mark is None:
            for mark in _MARK.finditer(text, self._scanned):
                if mark["think"] is None or (begin is not None and mark.start() >= begin):
                    self._mark = mark.start()
                    return self._mark
        if self._mark is not None:
            return self._mark
        begins = _MARK_BEGINS.search(text, max(0, len(text) - LONGEST_MARK - 2))
        self._scanned = len(text) if begins is None else begins.start()
        return self._scanned


class ChoiceReader:
    """Reads one completion, whole or as it is sampled. Used by the render thread."""

    def __init__(self, index: int, request: GenerationRequest, call: Call, renderer: Renderer) -> None:
        self._index = index
        self._request_id = request.request_id
        self._prompt: list[int] = request.prompt_token_ids.tolist()
        self._asked = call.prompts[index // call.choices]
        self._stop = call.stop
        self._renderer = renderer
        chat = self._asked if isinstance(self._asked, Chat) else None
        self._deltas = TextDeltas(
            renderer.decode,
            stops=call.stop,
            content=None if chat is None else lambda tokens: self._said(tokens, FinishReason.LENGTH).content,
            calls=chat is not None and bool(chat.tools),
        )
        self._pieces: list[Piece] = []
        self._told = 0  # pieces

    @property
    def ended(self) -> bool:
        """What was sampled holds a stop text: the choice is complete."""
        return self._deltas.ended

    def add(self, piece: Piece) -> Delta | None:
        """The delta that can be sent after these tokens; None: nothing yet."""
        self._pieces.append(piece)
        text = self._deltas.add(piece.token_ids.tolist())
        if self.ended or (self._told and not text):
            return None
        new = Piece.join(self._pieces[self._told :])
        delta = self._delta(text, new.token_ids, new.logprobs)
        self._told = len(self._pieces)
        return delta

    def finish(self, completion: Completion | None = None) -> Delta:
        """The last delta, with the complete choice.

        Args:
            completion: None: the pieces added so far.

        Raises:
            ApiError: the complete answer does not begin with the text that was sent.
        """
        choice = self.read(completion or self._so_far())
        told = self._pieces[self._told - 1].end if self._told else 0
        rest = self._deltas.rest(choice.message.content)
        return self._delta(rest, choice.completion.token_ids[told:], choice.completion.logprobs[told:], choice)

    def read(self, completion: Completion) -> Choice:
        """Find the end of a completion, and in a chat what was said."""
        tokens: list[int] = completion.token_ids.tolist()
        stopped = completion.finish_reason is FinishReason.STOP
        said = tokens[:-1] if stopped else tokens
        text = self._renderer.decode(said)
        cut = self._first_stop(text)
        if cut < len(text):
            kept = self._tokens_until_stop(said)
            tokens, said, text, stopped = tokens[:kept], said[:kept], text[:cut], True
            completion = replace(
                completion,
                token_ids=completion.token_ids[:kept],
                logprobs=completion.logprobs[:kept],
                versions=completion.versions[:kept],
                finish_reason=FinishReason.LENGTH,  # its last token is no stop token
            )
        message = Message("assistant", text)
        if isinstance(self._asked, Chat):
            # Without its stop token a turn is read as one that was cut, which is what it is after a stop text.
            ended = len(tokens) > len(said) and tokens[-1] in self._renderer.stop_token_ids
            message = self._said(tokens if ended else said, FinishReason.STOP if ended else FinishReason.LENGTH)
            content = message.content + "".join(call.raw for call in message.tool_calls)
            message = message._replace(
                content=content[: self._first_stop(content)],
                tool_calls=tuple(call for call in message.tool_calls if not call.problem),
            )
        return Choice(index=self._index, prompt=self._prompt, completion=completion, message=message, stopped=stopped)

    def _said(self, tokens: Sequence[int], reason: FinishReason) -> Message:
        assert isinstance(self._asked, Chat)
        return self._renderer.parse(tokens, reason, self._prompt, self._asked.tools)

    def _delta(self, text: str, tokens: np.ndarray, logprobs: np.ndarray, choice: Choice | None = None) -> Delta:
        return Delta(
            index=self._index,
            first=not self._told,
            prompt=self._prompt,
            text=text,
            tokens=tokens.tolist(),
            # not `max`, which may return NaN
            logprobs=[each if each > LOWEST_LOGPROB else LOWEST_LOGPROB for each in logprobs.tolist()],
            choice=choice,
        )

    def _so_far(self) -> Completion:
        sampled = Piece.join(self._pieces)
        return Completion(
            request_id=self._request_id,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            finish_reason=FinishReason.LENGTH,
        )

    def _first_stop(self, text: str) -> int:
        """Where the first stop text begins; the text's length where there is none."""
        return min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=len(text))

    def _tokens_until_stop(self, tokens: Sequence[int]) -> int:
        """The least number of tokens whose text holds a stop text."""
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            text = self._renderer.decode(tokens[:middle])
            low, high = (low, middle) if self._first_stop(text) < len(text) else (middle + 1, high)
        return low
