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

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.gateway.calls import ApiError, Chat, Choice, CompletionCall, Delta
from titan_rl.types import Completion, FinishReason, GenerationRequest, Message, Piece, sampled_arrays

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

PARSE_EACH = 256
"""A turn without content so far is parsed again at each piece while it has at most this many tokens. A longer turn is
parsed when it has grown by a sixteenth, or when a mark was closed."""

Read = Callable[[Sequence[int]], str]


class StreamedText:
    """The text of one choice: what is sure of it, and how much of that was sent.

    sure    "<think>hm</think>\\n\\nSo it is  <too"
                                 ^begin    ^sent: white space and the beginning of a mark are held back
    """

    def __init__(
        self, decode: Read, *, stops: Sequence[str] = (), content: Read | None = None, calls: bool = False
    ) -> None:
        """`stops`: texts that end the completion. `content`: of a chat, what is content in a turn of these tokens that
        was cut off here; None: all text is. `calls`: whether the policy may call tools, in some formats by a turn that
        is nothing but JSON."""
        self._decode = decode
        self._stops = stops
        self._content = content
        self._calls = calls
        self.tokens: list[int] = []
        self.sure = ""
        """Text that later tokens cannot change."""
        self._context, self._decoded = 0, 0
        # The tokens up to `_decoded` are in `sure`. Those from `_context` on are decoded again with the new ones, which
        # are then not at a text's beginning.
        self._begin: int | None = 0 if content is None else None  # where in `sure` the content begins, once it does
        self._sent = 0  # up to where in `sure` it was sent
        self._parsed = 0  # tokens, when the turn was last parsed
        self.ended = False
        """A stop text was found: what is sampled from here on is not part of the answer."""

    def add(self, tokens: Sequence[int]) -> str:
        """Tokens were sampled; no stop token is among them. Returns what may be read now, perhaps nothing."""
        if self.ended:
            return ""
        before = len(self.sure)
        self._extend(tokens)
        end = self._before_stop(before)
        if self._content is None:
            return self._send(end)
        begin = self._begin
        if begin is None and (begin := self._find_content(before)) is None:
            return ""
        end = begin + len(self.sure[begin : min(end, self._before_mark(begin))].rstrip())
        if end <= begin or (self._calls and self.sure[begin] in "{["):
            return ""
        if self._begin is None:  # for good: what was sent is not taken back
            self._begin = self._sent = begin
        return self._send(end)

    def rest(self, content: str) -> str:
        """What is still to be read of the complete answer's content. Raises as `_unsent`."""
        return _unsent(content, "" if self._begin is None else self.sure[self._begin : self._sent])

    def _extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        unsure = self._unsure()
        if unsure and not unsure.endswith(HALF):
            self.sure += unsure
            self._context, self._decoded = self._decoded, len(self.tokens)

    def _unsure(self) -> str:
        known = self._decode(self.tokens[self._context : self._decoded])
        return self._decode(self.tokens[self._context :])[len(known) :]

    def _send(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self.sure[start:end]

    def _before_stop(self, searched: int) -> int:
        """Length of the text before the first stop text, or before what may be the beginning of one. `searched`
        characters were searched before."""
        text, end = self.sure, len(self.sure)
        for stop in self._stops:
            found = text.find(stop, max(0, searched - len(stop)))
            if found >= 0:
                self.ended = True
                end = min(end, found)
            parts = (length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length]))
            end = min(end, len(text) - next(parts, 0))
        return end

    def _find_content(self, before: int) -> int | None:
        """Where the content begins, as the renderer parses the turn so far. None: nowhere yet, or it is not the time to
        parse, or a call has begun before it."""
        assert self._content is not None
        count, closes_a_mark = len(self.tokens), any(end in self.sure[before:] for end in ">]")
        if count > PARSE_EACH and count < self._parsed * 17 // 16 and not closes_a_mark:
            return None
        self._parsed = count
        whole = (self.sure + self._unsure()).rstrip()
        content = self._content(self.tokens).rstrip()
        begin = len(whole) - len(content)
        if not content or begin >= len(self.sure) or not whole.endswith(content):
            return None
        return None if any(mark["think"] is None for mark in _MARK.finditer(self.sure, 0, begin)) else begin

    def _before_mark(self, begin: int) -> int:
        """Length of the text before the first mark of the content, or before what may be the beginning of one."""
        start = max(begin, self._sent)
        if mark := _MARK.search(self.sure, start):
            return mark.start()
        begins = _MARK_BEGINS.search(self.sure, max(start, len(self.sure) - LONGEST_MARK - 2))
        return len(self.sure) if begins is None else begins.start()


def _unsent(text: str, sent: str) -> str:
    """Raises ApiError: what was sent is not how it begins: this module does not know the chat format well enough."""
    if not text.startswith(sent):
        raise ApiError(500, "the complete turn reads otherwise than what was streamed of it", code="internal_error")
    return text[len(sent) :]


class ChoiceReader:
    """Reads one completion, whole or as it is sampled. Used by the render thread."""

    def __init__(self, index: int, request: GenerationRequest, call: CompletionCall, renderer: Renderer) -> None:
        self._index = index
        self._request_id = request.request_id
        self._prompt: list[int] = request.prompt_token_ids.tolist()
        prompt = call.prompts[index // call.choices]
        self._chat = prompt if isinstance(prompt, Chat) else None
        self._stop = call.stop
        self._renderer = renderer
        self._text = StreamedText(
            renderer.decode,
            stops=call.stop,
            content=None if self._chat is None else self._content_so_far,
            calls=self._chat is not None and bool(self._chat.tools),
        )
        self._logprobs = call.logprobs
        self._pieces: list[Piece] = []
        self._sent = 0  # pieces
        self._reasoning, self._reasoning_sent = "", ""  # of the turn when it was last parsed

    def read_next(self, what: Piece | Completion) -> Delta | None:
        """The delta that can be sent after these tokens; None: nothing yet. The last one has the complete choice: after
        the completion, or after the piece that completes a stop text."""
        if isinstance(what, Completion):
            return self.finish(what)
        self._pieces.append(what)
        text = self._text.add(what.token_ids.tolist())
        if self._text.ended:
            sampled = sampled_arrays(*self._pieces)
            return self.finish(Completion(request_id=self._request_id, finish_reason=FinishReason.LENGTH, **sampled))
        if self._sent and not text:
            return None
        new = Piece.join(self._pieces[self._sent :])
        delta = self._delta(text, new.token_ids, new.logprobs)
        self._sent = len(self._pieces)
        return delta

    def finish(self, completion: Completion) -> Delta:
        """The last delta, with the complete choice. Raises ApiError: the complete answer does not begin with the text
        that was sent."""
        choice = self.read(completion)
        sent = self._pieces[self._sent - 1].end if self._sent else 0
        rest = self._text.rest(choice.message.content)
        return self._delta(rest, choice.completion.token_ids[sent:], choice.completion.logprobs[sent:], choice)

    def read(self, completion: Completion) -> Choice:
        """Find the end of a completion, and in a chat what was said."""
        tokens: list[int] = completion.token_ids.tolist()
        stopped = completion.finish_reason is FinishReason.STOP
        turn = tokens[:-1] if stopped else tokens
        text = self._renderer.decode(turn)
        cut = self._first_stop(text)
        ended_by = text[cut:] or self._renderer.decode(tokens[len(turn) :])
        if cut < len(text):
            count = self._tokens_until_stop(turn)
            tokens, turn, text, stopped = tokens[:count], turn[:count], text[:cut], True
            # its last token is no stop token
            completion = replace(completion, finish_reason=FinishReason.LENGTH, **sampled_arrays(completion, end=count))
        message = Message("assistant", text)
        if self._chat is not None:
            # Without its stop token a turn is read as one that was cut, which is what it is after a stop text.
            ended = len(tokens) > len(turn) and tokens[-1] in self._renderer.stop_token_ids
            message = self._parse(tokens if ended else turn, FinishReason.STOP if ended else FinishReason.LENGTH)
            content = message.content + "".join(call.raw for call in message.tool_calls)
            message = message._replace(
                content=content[: self._first_stop(content)],
                tool_calls=tuple(call for call in message.tool_calls if not call.problem),
            )
        stop_text = next((stop for stop in self._stop if ended_by.startswith(stop)), "")
        return Choice(completion=completion, message=message, stopped=stopped, stop_text=stop_text)

    def _content_so_far(self, tokens: Sequence[int]) -> str:
        message = self._parse(tokens, FinishReason.LENGTH)
        self._reasoning = message.reasoning
        return message.content

    def _parse(self, tokens: Sequence[int], reason: FinishReason) -> Message:
        assert self._chat is not None
        return self._renderer.parse(tokens, reason, self._prompt, self._chat.tools)

    def _delta(self, text: str, tokens: np.ndarray, logprobs: np.ndarray, choice: Choice | None = None) -> Delta:
        return Delta(
            index=self._index,
            first=not self._sent,
            prompt=self._prompt,
            reasoning=self._rest_of_reasoning(self._reasoning if text else "", choice),
            text=text,
            tokens=tokens.tolist(),
            token_texts=[self._renderer.decode([token]) for token in tokens.tolist()] if self._logprobs else [],
            # not `max`, which may return NaN
            logprobs=[each if each > LOWEST_LOGPROB else LOWEST_LOGPROB for each in logprobs.tolist()],
            choice=choice,
        )

    def _rest_of_reasoning(self, reasoning: str, choice: Choice | None) -> str:
        """All of it goes out with the first text, or at the end. Raises as `_unsent`."""
        sent = self._reasoning_sent
        self._reasoning_sent = choice.message.reasoning if choice is not None else reasoning or sent
        return _unsent(self._reasoning_sent, sent)

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
