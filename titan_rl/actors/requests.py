"""Requests and completions between actors: the requests of one tick travel together, each answer as it finishes.

    client ── generate_many(requests) ──▶ server       one message per tick, in order
    client ◀── Answers(pieces) ───────────────         for streamed requests: the tokens sampled so far
    client ◀── Answers(completions, failures) ──       any number of messages; each request id once
    client ── abort(ids) ──▶ server                    they are still answered, with the tokens they have

Rank 0 of a generator and the router are both a `RequestServer`. Rollout workers and gateways talk to the router, the
router talks to generators. Every accepted request is answered once; if its server is gone, it fails. Answers have no
time-out, because only the server knows what it waits for. Pieces may be lost: the completion has all tokens. The
requests of a client that is gone are stopped (`client_lost`, `reset`): their ids may be used again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.actors.connection import Caller, ConnectedActor, Connection, caller, served
from titan_rl.errors import ActorFailed, ActorGone, GeneratorFailed, GeneratorNotServing, RequestError, TitanError
from titan_rl.types import Completion, GenerationRequest, Piece
from titan_rl.wire import Packed, pack

_log = logging.getLogger(__name__)

Failures = Sequence[tuple[str, TitanError]]
"""(request id, why)."""

_NO_COMPLETIONS = pack(Completion, [])

SESSIONS_SECONDS = 0.05
"""An ended session is reported within this time. Each message costs 0.7 ms over all processes that it wakes."""


@dataclass(frozen=True, slots=True)
class Answers:
    """One message to a client."""

    completions: Packed[Completion] | None = None
    failures: Failures = ()
    pieces: Packed[Piece] | None = None


class RequestServer(ConnectedActor):
    """An actor that completes requests. A subclass implements `take` and `give_up`, and calls `answer`."""

    def __init__(self) -> None:
        self._asked_by: dict[str, Caller] = {}  # by the ids of the requests that have no answer yet
        self._answered = asyncio.Event()  # set by answers, for those who cleared it

    @served
    async def generate_many(self, requests: Packed[GenerationRequest], who: str = "") -> None:
        """Complete these requests; answers are pushed to the caller as they finish.

        A request whose id is in use is refused; the live request is not affected. A message that raises fails its own
        requests and no others.

        Args:
            who: name of the client's mesh, for `client_lost`.
        """
        asking = caller()
        asking.who = who
        accepted: dict[str, int] = {}  # id: place in the message
        refused: list[tuple[str, TitanError]] = []
        for place, each in enumerate(requests.request_ids):
            if each in self._asked_by:
                refused.append((each, RequestError(f"request id {each} is already live")))
            else:
                self._asked_by[each] = asking
                accepted[each] = place
        try:
            unpacked = requests.unpack()
            self.take([unpacked[place] for place in accepted.values()])
        except Exception as why:
            _log.exception("a message of a client could not be taken")
            reason = f"could not be taken: {type(why).__name__}: {why}"
            self.answer([], [(each, RequestError(f"request {each!r} {reason}")) for each in accepted])
        if refused:
            asking.push(Answers(failures=refused))

    @served
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests; each is answered with the tokens it has. Ids that are not live are ignored."""
        self.give_up(request_ids)

    @served
    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """These conversations are over. The default does nothing."""

    @served
    async def client_lost(self, who: str) -> None:
        """The clients of this mesh are gone: stop their requests. Returns when none is live."""
        await self._stopped([each for each, asking in self._asked_by.items() if asking.who == who])

    @served
    async def reset(self) -> None:
        """Stop every request, because all clients are gone. Returns when none is live."""
        await self._stopped(self.live())

    async def _stopped(self, request_ids: Sequence[str]) -> None:
        self.give_up(request_ids)
        while any(each in self._asked_by for each in request_ids):
            self._answered.clear()
            await self._answered.wait()

    def take(self, requests: Sequence[GenerationRequest]) -> None:
        """Start on a message's requests. Must not block, because later messages would wait too."""
        raise NotImplementedError

    def give_up(self, request_ids: Sequence[str]) -> None:
        """See `abort`."""
        raise NotImplementedError

    def live(self) -> list[str]:
        """Request ids that have no answer yet."""
        return list(self._asked_by)

    def answer(self, completions: Sequence[Completion] | Packed[Completion], failures: Failures = ()) -> int:
        """Send each answer to its client, one message per client. Answers to ids that are not live are dropped.

        Returns:
            How many completions were sent.
        """
        if not (completions or failures):
            return 0
        if not isinstance(completions, Packed):
            completions, unsendable = _packed(completions)
            failures = [*failures, *unsendable]
        to: dict[Caller, tuple[list[int], list[tuple[str, TitanError]]]] = {}
        for place, request_id in enumerate(completions.request_ids):
            if (asking := self._asked_by.pop(request_id, None)) is not None:
                to.setdefault(asking, ([], []))[0].append(place)
        for request_id, error in failures:
            if (asking := self._asked_by.pop(request_id, None)) is not None:
                to.setdefault(asking, ([], []))[1].append((request_id, error))
        self._answered.set()
        for asking, (places, failed) in to.items():
            _push(asking, completions.select(places), failed)
        return sum(len(places) for places, _ in to.values())

    def hand_out(self, pieces: Sequence[Piece]) -> None:
        """Send each piece to its client, one message per client. Pieces of ids that are not live are dropped."""
        to: dict[Caller, list[Piece]] = {}
        for piece in pieces:
            if (asking := self._asked_by.get(piece.request_id)) is not None:
                to.setdefault(asking, []).append(piece)
        for asking, its in to.items():
            asking.push(Answers(pieces=pack(Piece, its)))


def _packed(completions: Sequence[Completion]) -> tuple[Packed[Completion], Failures]:
    """The completions that can be sent exactly, and why the others cannot."""
    try:
        return pack(Completion, completions), []
    except Exception as why:
        if len(completions) == 1:
            return _NO_COMPLETIONS, [_unsendable(completions[0].request_id, why)]
    alone = [(each, _packed([each])[1]) for each in completions]
    return pack(Completion, [each for each, no in alone if not no]), [why for _, no in alone for why in no]


def _unsendable(request_id: str, why: Exception) -> tuple[str, TitanError]:
    return request_id, RequestError(f"the answer to {request_id!r} cannot be sent: {type(why).__name__}: {why}")


def _push(asking: Caller, completions: Packed[Completion], failures: Failures) -> None:
    """Send one message of answers. An answer that cannot be sent fails its own request only."""
    try:
        asking.push(Answers(completions or None, failures))
    except Exception as why:
        ids = [*completions.request_ids, *(request_id for request_id, _ in failures)]
        if len(ids) == 1:
            return asking.push(Answers(failures=[_unsendable(ids[0], why)]))
        for place in range(len(completions)):
            _push(asking, completions.select([place]), [])
        for failure in failures:
            _push(asking, completions.select([]), [failure])


def is_gone(error: TitanError) -> bool:
    """Whether this error of a generator means that it is gone, and not only out of service."""
    return isinstance(error, (ActorGone, GeneratorFailed)) and not isinstance(error, GeneratorNotServing)


class RequestClient:
    """Sends requests to one server and hands every answer to `on_answers`; each request that was sent is answered once.
    Belongs to one event loop."""

    def __init__(
        self,
        server: Any,
        *,
        name: str,
        on_answers: Callable[[Packed[Completion], list[tuple[str, TitanError]]], None],
        on_pieces: Callable[[list[Piece]], None],
        who: str = "",
    ) -> None:
        """
        Args:
            server: handle of a `RequestServer`.
            name: of the server, for errors.
            on_answers: called on the event loop with completions and failures; must not raise.
            on_pieces: called on the event loop with pieces of open requests.
            who: name of the mesh of this client, for `client_lost`.
        """
        self._name = name
        self._who = who
        self._on_answers = on_answers
        self._on_pieces = on_pieces
        self._open: set[str] = set()
        self._tick: list[GenerationRequest] = []  # to be sent at the end of this tick
        self._over: list[str] = []  # sessions that the server has not heard of
        self.connection = Connection(server, what=f"{name}.{{}}", on_push=self._hear, on_lost=self._on_lost)
        """For other calls to the same actor; they keep their order among the requests."""

    def send(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests for this tick's message."""
        self._flush_soon()
        self._tell_ended()  # first: a session may begin again
        for request in requests:
            self._open.add(request.request_id)
            self._tick.append(request)

    @property
    def waits(self) -> bool:
        """Whether any request is not answered yet."""
        return bool(self._open)

    def is_open(self, request_id: str) -> bool:
        """Whether the request is not answered yet, aborted or not."""
        return request_id in self._open

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the server to stop these requests. They are still answered, with the tokens sampled so far."""
        self._flush()  # the server would ignore an abort that arrives before its request
        self.connection.tell(RequestServer.abort, request_ids)

    def end_sessions(self, session_ids: Iterable[str]) -> None:
        """These conversations are over. A sticky strategy forgets each once its live requests have ended. The server
        hears of it with the next requests, or after `SESSIONS_SECONDS`."""
        if not self._over:
            asyncio.get_running_loop().call_later(SESSIONS_SECONDS, self._flush)
        self._over += session_ids

    def fail(self, error: TitanError) -> None:
        """The caller knows that the server is gone: fail all open requests with this error, and end the connection."""
        self._fail(list(self._open), error)
        self.connection.lose(str(error))

    async def disconnect(self) -> None:
        """Disconnect. Open requests fail, and the server stops them."""
        self._flush()  # sessions that have ended
        if self._open:
            self.abort(tuple(self._open))
            await asyncio.sleep(0)  # the abort is sent at the end of the tick
        self._fail(list(self._open), ActorFailed(f"{self._name}: the client was closed"))
        await self.connection.close()

    def _flush_soon(self) -> None:
        """At the end of this tick."""
        if not self._tick:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._send_tick()
        self._tell_ended()

    def _tell_ended(self) -> None:
        ended, self._over = self._over, []
        if ended:
            self.connection.tell(RequestServer.end_sessions, ended)

    def _send_tick(self) -> None:
        requests, self._tick = [each for each in self._tick if each.request_id in self._open], []
        if not requests:
            return
        try:
            self.connection.tell(RequestServer.generate_many, pack(GenerationRequest, requests), self._who)
        except Exception as why:  # such as a token id of more than 32 bits; only its own request may fail
            if len(requests) == 1:
                request_id, reason = requests[0].request_id, f"cannot be sent: {type(why).__name__}: {why}"
                return self._fail([request_id], RequestError(f"request {request_id!r} {reason}"))
            for request in requests:
                self._tick = [request]
                self._send_tick()

    def _on_lost(self, reason: str) -> None:
        self._fail(list(self._open), ActorGone(f"{self._name}.generate_many: {reason}"))

    def _hear(self, answers: Answers) -> None:
        try:
            self._take(answers)
        except Exception as why:  # costs only this message's requests; the connection goes on
            _log.exception("a message of %s could not be taken", self._name)
            reason = f"{self._name}: its answer could not be taken: {type(why).__name__}: {why}"
            ids = [] if answers.completions is None else answers.completions.request_ids
            self._fail([*ids, *(each for each, _ in answers.failures)], RequestError(reason))

    def _take(self, answers: Answers) -> None:
        if answers.pieces is not None:
            self._on_pieces([piece for piece in answers.pieces.unpack() if piece.request_id in self._open])
        packed = answers.completions or _NO_COMPLETIONS
        completions = packed.select([place for place, each in enumerate(packed.request_ids) if each in self._open])
        self._open.difference_update(packed.request_ids)
        failures = [each for each in answers.failures if self._close(each[0])]
        if completions or failures:
            self._on_answers(completions, failures)

    def _fail(self, request_ids: Iterable[str], error: TitanError) -> None:
        failures = [(request_id, error) for request_id in request_ids if self._close(request_id)]
        if failures:
            self._on_answers(_NO_COMPLETIONS, failures)

    def _close(self, request_id: str) -> bool:
        """Close a request; returns whether it was open."""
        known = request_id in self._open
        self._open.discard(request_id)
        return known
