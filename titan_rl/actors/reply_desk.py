"""The answering side of `transport`: who waits for which request, and one message per port and occasion.

Every request that a desk accepted is answered once; what comes later is dropped, pieces too. A client's connection is
one call that stays open: it ends when the client leaves, and with an error when the desk closes. A message that raises
costs its own requests, and no others.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from monarch.actor import Channel

from titan_rl.errors import RequestError, TitanError
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece
from titan_rl.wire import PackedCompletions, PackedPieces, PackedRequests

KNOWN_PORTS = 1024
"""Clients whose rebuilt reply ports are kept; more are forgotten and rebuilt."""

NOTE_SECONDS = 0.01
"""For so long at most nobody hears that an answer went to a caller directly. Each note is a message: told at once, they
would cost as much as the requests themselves where answers are short. A router's load and a drain lag by this."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """One message of a client. Reduces itself to bytes for Monarch's pickler, as packed messages do."""

    requests: PackedRequests | None
    caller: bytes | None = None
    """The pickled port of whoever asked the one who asks; see `transport`."""
    aborts: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    """Ids of sessions that are over."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.requests, self.caller, self.aborts, self.ended)
        return _asked, (pickle.dumps(fields, pickle.HIGHEST_PROTOCOL),)


@dataclass(frozen=True, slots=True)
class Answers:
    """One message to a reply port."""

    completions: PackedCompletions | None = None
    failures: tuple[tuple[str, TitanError], ...] = ()
    """`(request id, why)`."""
    delivered: tuple[str, ...] = ()
    """Ids of requests whose completions were sent to their caller by somebody else than this message."""
    requests: tuple[int, bytes] | None = None
    """First message of a connection: its number, and the pickled port that takes `Asked`."""
    pieces: PackedPieces | None = None
    """Of requests that stream."""

    def request_ids(self) -> tuple[str, ...]:
        """Of the requests that this message answers."""
        completed = () if self.completions is None else self.completions.request_ids
        return (*completed, *(request_id for request_id, _ in self.failures))

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.completions, self.failures, self.delivered, self.requests, self.pieces)
        return _answers, (pickle.dumps(fields, pickle.HIGHEST_PROTOCOL),)


def _asked(fields: bytes) -> Asked:
    return Asked(*pickle.loads(fields))


def _answers(fields: bytes) -> Answers:
    return Answers(*pickle.loads(fields))


@dataclass(frozen=True, slots=True)
class Reply:
    """Where the answers to one message's requests go."""

    port: Any
    """Anything with the `send` of a port."""
    caller: Any = None
    """Port for what ends as it should; None: the same one."""
    address: bytes | None = None
    """`port`, pickled once: Monarch pickles a port with the code that rebuilds it, 0.1 ms each time."""


class ReplyDesk:
    """Knows where the answer of each live request id goes. Belongs to one event loop."""

    def __init__(self, *, note_seconds: float = NOTE_SECONDS) -> None:
        """
        Args:
            note_seconds: see `NOTE_SECONDS`.
        """
        self._note_seconds = note_seconds
        self._live: dict[str, Reply] = {}
        self._ports: dict[bytes, Any] = {}  # rebuilt
        self._connections: set[Any] = set()  # ports that take requests here
        self._notes: dict[int, _Outgoing] = {}  # what was delivered to callers and is still to be told, by port
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def connections(self) -> int:
        """Clients that are connected now."""
        return len(self._connections)

    def live(self) -> list[str]:
        """Request ids that have no answer yet."""
        return list(self._live)

    def address(self, request_id: str) -> bytes | None:
        """The pickled port of a live request; None if it is not live or its port is not one that travels."""
        reply = self._live.get(request_id)
        return None if reply is None else reply.address

    async def attend(
        self,
        address: bytes,
        connection: int,
        take: Callable[[Sequence[GenerationRequest], Reply], None],
        abort: Callable[[Sequence[str]], None],
        end: Callable[[Sequence[str]], None] = lambda session_ids: None,
    ) -> None:
        """Serve one client until it leaves or the desk closes: the body of the endpoint `generate_many`.

        A client that is killed says nothing: its port and this call stay until the desk closes, a few kilobytes.

        Args:
            address: the client's reply port, pickled.
            connection: the client's number for this connection.
            take: is given each message's requests; neither it nor the others may wait, or later messages would.
            abort: is given the ids that the client gives up, after the requests that it sent before.
            end: is given the ids of sessions that are over, after all their requests.
        """
        port, receiver = Channel[Any].open()
        reply = Reply(self._port_at(address), address=address)
        self._connections.add(port)
        try:
            reply.port.send(Answers(requests=(connection, cloudpickle.dumps(port))))
            while (asked := await receiver.recv()) is not None:
                if isinstance(asked, TitanError):
                    raise asked  # the desk was closed; the answers that say so may come after this call's end
                try:
                    if asked.requests is not None:
                        caller = None if asked.caller is None else self._port_at(asked.caller)
                        take(asked.requests.unpack(), reply if caller is None else Reply(reply.port, caller, address))
                    if asked.aborts:
                        abort(asked.aborts)
                    if asked.ended:
                        end(asked.ended)
                except Exception as why:
                    _log.exception("a message of a client could not be taken")
                    if asked.requests is not None:
                        self._refuse(asked.requests.request_ids, reply, f"{type(why).__name__}: {why}")
        finally:
            self._connections.discard(port)

    async def one(
        self, request: GenerationRequest, take: Callable[[Sequence[GenerationRequest], Reply], None]
    ) -> Completion:
        """Serve one request: the body of the endpoint `generate`."""
        answer = LocalPort()
        take([request], Reply(answer))
        return await answer.result()

    def open(self, requests: Sequence[GenerationRequest], reply: Reply) -> list[GenerationRequest]:
        """Register a message's requests; returns the accepted ones.

        A request id that is live already is refused at once; the request that holds it is not disturbed.
        """
        accepted: list[GenerationRequest] = []
        refused: list[tuple[str, TitanError]] = []
        for request in requests:
            request_id = request.request_id
            if request_id in self._live:
                refused.append((request_id, RequestError(f"request id {request_id} is already live")))
            else:
                self._live[request_id] = reply
                accepted.append(request)
        if refused:
            reply.port.send(Answers(failures=tuple(refused)))
        return accepted

    def _refuse(self, request_ids: Sequence[str], reply: Reply, reason: str) -> None:
        """A message raised: none of its requests gets another answer, and nobody else's is disturbed."""
        its = [each for each in request_ids if each not in self._live or self._live[each].port is reply.port]
        for request_id in its:
            self._live.pop(request_id, None)
        failures = tuple((each, RequestError(f"request {each!r} could not be taken: {reason}")) for each in its)
        reply.port.send(Answers(failures=failures))

    def answer(self, completions: Sequence[Completion], failures: Sequence[tuple[str, TitanError]] = ()) -> None:
        """Send each answer where it belongs, one message per port. Ids that are not live are dropped: a late answer."""
        to: dict[int, _Outgoing] = {}

        def out(port: Any) -> _Outgoing:
            outgoing = to.get(id(port))
            if outgoing is None:
                outgoing = to[id(port)] = _Outgoing(port)
            return outgoing

        for completion in completions:
            if (reply := self._live.pop(completion.request_id, None)) is None:
                continue
            if reply.caller is None or completion.finish_reason is FinishReason.ABORT:
                out(reply.port).completions.append(completion)
            else:
                out(reply.caller).completions.append(completion)
                self._note(reply.port, completion.request_id)
        for request_id, error in failures:
            if (reply := self._live.pop(request_id, None)) is not None:
                out(reply.port).failures.append((request_id, error))
        for outgoing in to.values():
            outgoing.send()

    def hand_out(self, pieces: Sequence[Piece]) -> None:
        """Send each piece to whoever sent the request, one message per port. Those of ids that are not live are
        dropped."""
        to: dict[int, tuple[Any, list[Piece]]] = {}
        for piece in pieces:
            if (reply := self._live.get(piece.request_id)) is not None:
                to.setdefault(id(reply.port), (reply.port, []))[1].append(piece)
        for port, its in to.values():
            port.send(Answers(pieces=PackedPieces.pack(its)))

    def delivered(self, request_ids: Sequence[str]) -> None:
        """Somebody else has answered these."""
        for request_id in request_ids:
            if (reply := self._live.pop(request_id, None)) is not None:
                self._note(reply.port, request_id)

    def close(self, error: TitanError) -> None:
        """Whatever is open fails, and every connection ends."""
        self.answer([], [(request_id, error) for request_id in self._live])
        if self._timer is not None:
            self._timer.cancel()
        self._tell()
        for port in self._connections:
            port.send(error)

    def _note(self, port: Any, request_id: str) -> None:
        note = self._notes.get(id(port))
        if note is None:
            note = self._notes[id(port)] = _Outgoing(port)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._note_seconds, self._tell)
        note.delivered.append(request_id)

    def _tell(self) -> None:
        self._timer = None
        notes, self._notes = self._notes, {}
        for note in notes.values():
            note.send()

    def _port_at(self, address: bytes) -> Any:
        """One port per address, so that answers to several messages of one client travel together."""
        if address not in self._ports:
            if len(self._ports) >= KNOWN_PORTS:
                self._ports.clear()
            self._ports[address] = pickle.loads(address)
        return self._ports[address]


@dataclass(slots=True)
class _Outgoing:
    """One message to one port."""

    port: Any
    completions: list[Completion] = field(default_factory=list)
    failures: list[tuple[str, TitanError]] = field(default_factory=list)
    delivered: list[str] = field(default_factory=list)

    def send(self) -> None:
        failures = list(self.failures)
        try:
            packed = PackedCompletions.pack(self.completions) if self.completions else None
        except ValueError:  # one of them cannot be carried as it is: that one fails alone
            sound = []
            for completion in self.completions:
                try:
                    PackedCompletions.pack([completion])
                    sound.append(completion)
                except ValueError as why:
                    request_id = completion.request_id
                    failures.append(
                        (request_id, RequestError(f"the completion of {request_id!r} cannot be sent: {why}"))
                    )
            packed = PackedCompletions.pack(sound)
        self.port.send(Answers(packed, tuple(failures), tuple(self.delivered)))


class LocalPort:
    """A reply port inside one actor, for one request."""

    def __init__(self) -> None:
        self._answers: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()

    def send(self, answers: Answers) -> None:
        if answers.pieces is None and not self._answers.done():
            self._answers.set_result(answers)

    async def result(self) -> Completion:
        """The one completion.

        Raises:
            TitanError: why there is none.
        """
        answers = await self._answers
        for _, error in answers.failures:
            raise error
        assert answers.completions is not None
        return answers.completions.unpack()[0]
