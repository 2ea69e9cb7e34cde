"""The text of a completion that its client may read, while it is being sampled and after.

The deltas of a choice and its `rest`, joined, are exactly the content of the complete choice. So text that later tokens
might change is held back:

- half a character (the bytes so far decode to U+FFFD), and text that may be the beginning of a stop text;
- in a chat, text that may be the beginning of a tool call or of thinking, and trailing white space, which a chat format
  may strip. From the first such mark on, all text is held back until the renderer has parsed the whole turn.

What was content before a mark stays content. Where a format would take it back at the mark, as Llama 3's does at a
header in the middle of a turn, the mark and all behind it are content too.

Thinking is read in the same way while it goes on, up to any mark in it. A tool call is certain from the token on that
closes it, its name no sooner than its arguments: in every format a call whose name is complete may still be cut off or
go on with what cannot be read, and then its text is content, streamed or not. Both are read only if they stay the same
should thinking end here (`</think>`), because a thought may hold what looks like a call.

    tokens  "Hi ", "<too", "l_call>{…"    stop text "!"
    deltas  "Hi",  "",     "",            rest: " …", or nothing when the call is read as one

Each token costs the decoding of a few, however long the completion is.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, repeat
from typing import Any, NamedTuple

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import TaskError
from titan_rl.gateway.calls import ApiError, Chat, Choice, CompletionCall, Delta, TokenLogprob
from titan_rl.types import Completion, FinishReason, GenerationRequest, Message, Piece, ToolCall, sampled_arrays

HALF = "\ufffd"
"""What bytes that are no character (yet) decode to."""
LOWEST_LOGPROB = -9999.0
"""JSON has neither infinity nor NaN; OpenAI's API uses this value for infinity."""

LONGEST_MARK = 80
"""Characters of a mark such as `<tool_call>`; what is longer is text."""

_THINK = r"</?(?:think|thinking|reasoning)(?::\w+)?>"
_CALL = r"<[^<>\s]{0,80}(?:(?:tool|call|func|invoke|arg|think|assistant)[^<>\s]{0,80}>|[|｜][^<>\s]{0,80}[>\s])"
_CALL += r"|\[/?[A-Z]+(?:_[A-Z]+)+\]"
_MARK = re.compile(f"(?P<think>{_THINK})|{_CALL}", re.IGNORECASE)
_MARK_BEGINS = re.compile(rf"(?:<[^<>\s]{{0,{LONGEST_MARK}}}|\[/?[A-Za-z_]{{0,{LONGEST_MARK}}})\Z")

THOUGHTS = ("think", "think:opensource")
"""Names of the marks around a thought. In formats with others, thoughts and calls are not read before the end."""
PARSE_EACH = 256
"""A turn without content so far is parsed again at each piece while it has at most this many tokens. A longer turn is
parsed when it has grown by a sixteenth, or when a mark was closed, and then at each of the next `PARSE_NEAR` tokens."""
PARSE_NEAR = 16


class News(NamedTuple):
    """What may be read of a choice that was not before."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(eq=False)
class StreamedText:
    """The text of one choice: what is sure of it, and how much of that was sent.

    sure    "<think>hm</think>\\n\\nSo it is  <too"
                                 ^begin    ^sent: white space and the beginning of a mark are held back
    """

    decode: Callable[[Sequence[int]], str]
    stops: Sequence[str] = ()
    """Texts that end the completion."""
    parse: Callable[[Sequence[int], Sequence[int]], Message] | None = None
    """Of a chat: how a turn reads that is cut off behind these tokens and those that end its thought. None: as text."""
    thought_end: Sequence[int] = ()
    """The tokens of `</think>`; empty: thoughts and calls are not read before the end."""
    tools: Sequence[str] = ()
    """Those that the policy may call."""

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.sure = ""
        """Text that later tokens cannot change."""
        self._context, self._decoded = 0, 0
        # The tokens up to `_decoded` are in `sure`. Those from `_context` on are decoded again with the new ones, which
        # are then not at a text's beginning.
        self._begin: int | None = 0 if self.parse is None else None  # where in `sure` the content begins, once it does
        self._sent = 0  # up to where in `sure` it was sent
        self._thought: int | None = None  # where in `sure` a thought begins that goes on
        self._reasoning = ""  # that was sent
        self._calls: tuple[ToolCall, ...] = ()  # that were sent
        self._parsed = 0  # tokens, when the turn was last parsed
        self._near = PARSE_EACH  # up to so many tokens it is parsed at each piece
        self.ended = False
        """A stop text was found: what is sampled from here on is not part of the answer."""

    def add(self, tokens: Sequence[int]) -> News:
        """Tokens were sampled; no stop token is among them. Returns what may be read now, perhaps nothing."""
        if self.ended:
            return News()
        before = len(self.sure)
        self.tokens += tokens
        unsure = self._unsure()
        if unsure and not unsure.endswith(HALF):
            self.sure += unsure
            self._context, self._decoded = self._decoded, len(self.tokens)
        end = self._before_stop(before)
        if self.ended:  # all that is left is read of the whole turn
            return News()
        if self.parse is None:
            return News(self._send(end))
        reasoning, calls = "", self._new_calls(before)
        begin = self._begin
        if begin is None:
            begin, reasoning = self._find_content(before, end)
        if begin is not None:
            end = self._before_mark(begin, max(begin, self._sent), end)
        if begin is None or end <= begin:
            return News("", reasoning, calls)
        if self._begin is None:
            if _may_be_call(self.sure[begin:end], self.tools):
                return News("", reasoning, calls)
            self._begin = self._sent = begin  # for good: what was sent is not taken back
        return News(self._send(end), reasoning, calls)

    def rest(self, said: Message) -> News:
        """What is still to be read of the complete answer. Raises ApiError: it does not begin with what was sent: this
        class does not know the chat format well enough."""
        sent, calls = "" if self._begin is None else self.sure[self._begin : self._sent], len(self._calls)
        same = said.content.startswith(sent) and said.reasoning.startswith(self._reasoning)
        if not same or said.tool_calls[:calls] != self._calls:
            raise ApiError(500, "the complete turn reads otherwise than what was streamed of it", code="internal_error")
        return News(said.content[len(sent) :], said.reasoning[len(self._reasoning) :], said.tool_calls[calls:])

    def _unsure(self) -> str:
        known = self.decode(self.tokens[self._context : self._decoded])
        return self.decode(self.tokens[self._context :])[len(known) :]

    def _send(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self.sure[start:end]

    def _before_stop(self, searched: int) -> int:
        """Length of the text before a stop text, or what may begin one. `searched` characters were searched before."""
        text, end = self.sure, len(self.sure)
        for stop in self.stops:
            found = text.find(stop, max(0, searched - len(stop)))
            if found >= 0:
                self.ended = True
                end = min(end, found)
            parts = (length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length]))
            end = min(end, len(text) - next(parts, 0))
        return end

    def _find_content(self, before: int, end: int) -> tuple[int | None, str]:
        """Where the content begins, as the renderer parses the turn so far, and what is new of the thought before it.
        None: nowhere yet, or it is not the time to parse, or a call has begun before it."""
        assert self.parse is not None
        count, begin = len(self.tokens), None
        if any(mark in self.sure[before:] for mark in ">]"):
            self._near = max(self._near, count + PARSE_NEAR)
        if count <= self._near or count >= self._parsed * 17 // 16:
            self._parsed = count
            said = self.parse(self.tokens, ())
            begin = self._tail(said.content)
            if begin is not None and said.reasoning.startswith(self._reasoning):
                new, self._reasoning = said.reasoning[len(self._reasoning) :], said.reasoning
                return begin, new
            if self._thought is None and said.reasoning and self.thought_end:
                said = self.parse(self.tokens, self.thought_end)
                self._thought = None if said.content else self._tail(said.reasoning)
        if self._thought is None:
            return begin, ""
        start = self._thought + len(self._reasoning)
        new = self.sure[start : self._before_mark(self._thought, start, end)]
        self._reasoning += new
        return begin, new

    def _tail(self, part: str) -> int | None:
        """Where this part of the turn, white space at its end apart, begins if it goes on up to the turn's end. None:
        it does not, or there is a mark of a call before it."""
        whole, part = (self.sure + self._unsure()).rstrip(), part.rstrip()
        begin = len(whole) - len(part)
        if not part or begin >= len(self.sure) or not whole.endswith(part):
            return None
        return None if any(mark["think"] is None for mark in _MARK.finditer(self.sure, 0, begin)) else begin

    def _new_calls(self, before: int) -> tuple[ToolCall, ...]:
        """Calls that were closed, and are certain. Each format has marks of its own, and any may close one."""
        if not (self.tools and self.thought_end):
            return ()
        assert self.parse is not None
        marks = _MARK.finditer(self.sure, max(0, before - LONGEST_MARK - 2))
        if not any(mark.end() > before and mark["think"] is None for mark in marks):
            return ()
        now, later = (_readable(self.parse(self.tokens, end)) for end in ((), self.thought_end))
        sent = len(self._calls)
        if now != later or now[:sent] != self._calls:
            return ()
        self._calls = now
        return now[sent:]

    def _before_mark(self, begin: int, start: int, end: int) -> int:
        """Where the text from `begin` on ends, at most at `end`: before the first mark or what may be the beginning of
        one, and before white space. Up to `start` there is no mark."""
        if mark := _MARK.search(self.sure, start):
            end = min(end, mark.start())
        elif begins := _MARK_BEGINS.search(self.sure, max(start, len(self.sure) - LONGEST_MARK - 2)):
            end = min(end, begins.start())
        return begin + len(self.sure[begin:end].rstrip())


def _may_be_call(text: str, tools: Sequence[str]) -> bool:
    """Whether a turn whose content begins so may be a call without a mark before it: nothing but JSON, or a name."""
    return bool(tools) and (text[:1] in "{[" or any(name.startswith(text.strip()) for name in tools))


def _readable(said: Message) -> tuple[ToolCall, ...]:
    return tuple(call for call in said.tool_calls if not call.problem)


class ChoiceReader:
    """Reads one completion, whole or as it is sampled. Used by the render thread."""

    def __init__(self, index: int, request: GenerationRequest, call: CompletionCall, renderer: Renderer) -> None:
        self._index = index
        self._request_id = request.request_id
        self._prompt: list[int] = request.prompt_token_ids.tolist()
        self._asked = call.prompts[index // call.choices]
        self._chat = self._asked if isinstance(self._asked, Chat) else None
        self._call = call
        self._renderer = renderer
        self._token_bytes = lru_cache(maxsize=None)(renderer.token_bytes)  # prompts and lists of likeliest repeat many
        thought_end: list[int] = []
        self._kept: tuple[int, Message] | None = None  # where the first mark begins, and the turn up to there
        if self._chat is not None:
            for name in THOUGHTS:
                with suppress(TaskError):  # a tokenizer that cannot write it has no thoughts
                    thought = renderer.parse(renderer.encode(f"<{name}>a</{name}>"), FinishReason.LENGTH)
                    if thought.reasoning == "a" and not thought.content:
                        thought_end = renderer.encode(f"</{name}>")
        self._text = StreamedText(
            renderer.decode,
            stops=call.stop,
            parse=None if self._chat is None else lambda tokens, end: self._parse([*tokens], FinishReason.LENGTH, end),
            thought_end=thought_end,
            tools=[] if self._chat is None else [tool.name for tool in self._chat.tools],
        )
        self._pieces: list[Piece] = []
        self._sent = 0  # pieces
        self._called = 0  # calls that were sent

    def read_next(self, what: Piece | Completion) -> Delta | None:
        """The delta that can be sent after these tokens; None: nothing yet. The last one has the complete choice: after
        the completion, or after the piece that completes a stop text."""
        if isinstance(what, Completion):
            return self.finish(what)
        if self._call.max_new_tokens == 0:
            return None
        self._pieces.append(what)
        news = self._text.add(what.token_ids.tolist())
        if self._text.ended:
            sampled = sampled_arrays(*self._pieces)
            return self.finish(Completion(request_id=self._request_id, finish_reason=FinishReason.LENGTH, **sampled))
        if self._sent and not any(news):
            return None
        delta = self._delta(news, Piece.join(self._pieces[self._sent :]))
        self._sent = len(self._pieces)
        return delta

    def finish(self, completion: Completion) -> Delta:
        """The last delta, with the complete choice. Raises ApiError: it does not begin with the text that was sent."""
        choice = self.read(completion)
        news, calls = self._text.rest(choice.message), self._named(choice.message.tool_calls)
        sent = self._pieces[self._sent - 1].end if self._sent else 0
        rest = Piece(request_id="", offset=sent, **sampled_arrays(choice.completion, start=sent))
        return self._delta(news, rest, replace(choice, message=choice.message._replace(tool_calls=calls)))

    def read(self, completion: Completion) -> Choice:
        """Find the end of a completion, and in a chat what was said."""
        if self._call.max_new_tokens == 0:
            completion = replace(completion, finish_reason=FinishReason.LENGTH, **sampled_arrays(completion, end=0))
        tokens: list[int] = completion.token_ids.tolist()
        stopped = completion.finish_reason is FinishReason.STOP
        turn = tokens[:-1] if stopped else tokens
        text = self._renderer.decode(turn)
        cut = self._first_stop(text)
        ended_by = text[cut:] or self._renderer.decode(tokens[len(turn) :])
        if cut < len(text):
            end = self._tokens_until_stop(turn)
            tokens, turn, text, stopped = tokens[:end], turn[:end], text[:cut], True
            # its last token is no stop token
            completion = replace(completion, finish_reason=FinishReason.LENGTH, **sampled_arrays(completion, end=end))
        message = Message("assistant", text)
        if self._chat is not None:
            # Without its stop token a turn is read as one that was cut, which is what it is after a stop text.
            ended = len(tokens) > len(turn) and tokens[-1] in self._renderer.stop_token_ids
            message = self._parse(tokens if ended else turn, FinishReason.STOP if ended else FinishReason.LENGTH)
            content = message.content + "".join(call.raw for call in message.tool_calls)
            if message.reasoning and not content and not message.tool_calls:
                # A thought that was cut off reads as if it had ended there; some formats strip only one that ended.
                thought = self._parse(turn, FinishReason.LENGTH, self._text.thought_end)
                message = message if thought.content else thought
            message = message._replace(
                content=content[: self._first_stop(content)],
                reasoning=message.reasoning[: self._first_stop(message.reasoning)],
                tool_calls=_readable(message),
            )
        stop_text = next((stop for stop in self._call.stop if ended_by.startswith(stop)), "")
        return Choice(completion=completion, message=message, stopped=stopped, stop_text=stop_text)

    def _parse(self, tokens: list[int], reason: FinishReason, end: Sequence[int] = ()) -> Message:
        """How a turn of these tokens, the completion's first ones, and of those of `end` reads."""
        turn = tokens[:-1] if reason is FinishReason.STOP else tokens
        said = self._as_format([*tokens, *end], reason)
        if self._kept is None:
            self._keep(turn)
        place, kept = self._kept or (0, said)
        if said.content.startswith(kept.content) and said.reasoning.startswith(kept.reasoning):
            return said
        text = self._renderer.decode([*turn, *end])
        return kept._replace(content=kept.content + text[place:]) if len(text) > place else said

    def _as_format(self, tokens: Sequence[int], reason: FinishReason) -> Message:
        assert self._chat is not None
        said = self._renderer.parse(tokens, reason, self._prompt, self._chat.tools)
        # GLM's formats strip it only beside calls
        return said._replace(content=said.content.lstrip()) if self._text.tools else said

    def _keep(self, turn: list[int]) -> None:
        """Find the first mark: content before it may have been streamed, and none behind it."""
        text = self._renderer.decode(turn)
        mark = next((each for each in _MARK.finditer(text) if each["think"] is None), None)
        if mark is None:
            return
        ends = range(len(turn) + 1)
        before = bisect_right(ends, mark.start(), key=lambda end: len(self._renderer.decode(turn[:end]))) - 1
        said = self._as_format(turn[:before], FinishReason.LENGTH)
        content = said.content.rstrip()
        kept = len(text[: mark.start()].rstrip()), said._replace(content=content)
        self._kept = kept if content and not _may_be_call(content, self._text.tools) else (0, Message("assistant", ""))

    def _delta(self, news: News, new: Piece, choice: Choice | None = None) -> Delta:
        first_call, self._called = self._called, self._called + len(news.calls)
        tokens: list[int] = new.token_ids.tolist()
        tops: Iterable[Any] = repeat(()) if new.top_logprobs is None else new.top_logprobs.tolist()
        sampled = map(self._logprob, count(new.offset), tokens, new.logprobs.tolist(), tops)
        first, told = not self._sent, self._call.logprobs is not None
        return Delta(
            index=self._index,
            first=first,
            prompt=self._prompt,
            echo=self._echo() if first and self._call.echo else "",
            echoed=self._prompt_logprobs(new) if first and self._call.echo and told else (),
            reasoning=news.reasoning,
            text=news.text,
            calls=self._named(news.calls, first_call),
            first_call=first_call,
            tokens=tokens,
            logprobs=[*sampled] if told else [],
            choice=choice,
        )

    def _named(self, calls: Sequence[ToolCall], first: int = 0) -> tuple[ToolCall, ...]:
        """Calls of the turn from the `first` on, with ids to which their answers can refer."""
        ids = (f"call-{self._request_id}-{number}" for number in count(first))
        return tuple(call._replace(id=call.id or own) for call, own in zip(calls, ids, strict=False))

    def _echo(self) -> str:
        """The prompt as it was sent. Beside logprobs it is what its tokens say: tokenizers change some texts."""
        if isinstance(self._asked, str) and self._call.logprobs is None:
            return self._asked
        return self._renderer.decode(self._prompt)

    def _prompt_logprobs(self, new: Piece) -> list[TokenLogprob]:
        rows: list[Any] = [] if new.prompt_logprobs is None else new.prompt_logprobs.tolist()
        told = [self._logprob(place, token, value, top) for place, ((token, value), *top) in enumerate(rows, 1)]
        return [TokenLogprob(self._bytes(self._prompt[0], 0), None), *told]

    def _logprob(self, place: int, token: int, logprob: float, top: Iterable[tuple[int, float]]) -> TokenLogprob:
        likeliest = [(self._bytes(each, place), value) for each, value in top if value > LOWEST_LOGPROB]
        told = logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # not `max`, which may return NaN
        return TokenLogprob(self._bytes(token, place), told, likeliest)

    def _bytes(self, token: int, place: int) -> bytes:
        text = HALF if place else self._renderer.decode([token])  # some tokenizers begin a text in another way
        return self._token_bytes(token) if HALF in text else text.encode()

    def _first_stop(self, text: str) -> int:
        """Where the first stop text begins; the text's length where there is none."""
        return min((place for stop in self._call.stop if (place := text.find(stop)) >= 0), default=len(text))

    def _tokens_until_stop(self, tokens: Sequence[int]) -> int:
        """The least number of tokens whose text holds a stop text."""

        def holds_one(end: int) -> bool:
            text = self._renderer.decode(tokens[:end])
            return self._first_stop(text) < len(text)

        return bisect_left(range(len(tokens)), True, 1, key=holds_one)
