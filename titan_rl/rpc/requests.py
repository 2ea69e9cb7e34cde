"""Requests and completions between actors: the requests of one tick travel together, each answer as it finishes.

    client ── generate_many(requests) ──▶ server       one message per tick, in order
    client ◀── Answers(pieces) ───────────────         for streamed requests: the tokens sampled so far
    client ◀── Answers(completions, failures) ──       any number of messages; each request id once
    client ── abort(ids) ──▶ server                    they are still answered, with the tokens they have

Rank 0 of a generator and the router are both a `RequestServer`. Rollout workers and gateways talk to the router, the
router talks to generators. Every accepted request is answered once; if its server is gone, it fails. Answers have no
time-out, because only the server knows what it waits for. Pieces may be lost: the completion has all tokens. The
requests of a client that is gone are stopped (`client_lost`): their ids may be used again.

The items of a message are packed into a few flat arrays: pickling 256 small completions one by one costs more than
sampling them. The router hands packed completions on without unpacking them. Packing is exact: `unpack` gives what was
packed, in the same order, and its arrays are views of the message. Every item can be packed: its type refuses arrays of
other dtypes or lengths.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from titan_rl.errors import ActorFailed, ActorGone, GeneratorFailed, GeneratorNotServing, RequestError, TitanError
from titan_rl.rpc.connection import Caller, ConnectedActor, Connection, caller, endpoint
from titan_rl.rpc.mesh_client import MeshClient
from titan_rl.types import PROMPT_ARRAYS, SAMPLED_ARRAYS, Completion, GenerationRequest, Piece

T = TypeVar("T", GenerationRequest, Completion, Piece)

_log = logging.getLogger(__name__)

Failures = Sequence[tuple[str, TitanError]]
"""(request id, why)."""

_ARRAYS = {GenerationRequest: PROMPT_ARRAYS, Completion: SAMPLED_ARRAYS, Piece: SAMPLED_ARRAYS}
_COLUMNS: dict[type, list[str]] = {
    kind: [name for name in kind.__dataclass_fields__ if name not in arrays]  # type: ignore[attr-defined]
    for kind, arrays in _ARRAYS.items()
}
"""All other fields, which travel as they are."""


@dataclass(frozen=True, slots=True)
class Packed(Generic[T]):
    """Many items in one message. The arrays travel as bytes: pickling an array costs as much as fifty requests."""

    kind: type[T]
    lengths: np.ndarray  # [n] int64
    arrays: tuple[np.ndarray, ...]  # each [sum of lengths], in the order of `_ARRAYS`
    columns: tuple[tuple[Any, ...], ...]  # each [n]: the other fields, in the order of `_COLUMNS`

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = [bytearray(np.ascontiguousarray(array)) for array in (self.lengths, *self.arrays)]
        return _from_message, (self.kind, arrays, self.columns)

    def column(self, name: str) -> tuple[Any, ...]:
        """One field of every item, which is no array."""
        return self.columns[_COLUMNS[self.kind].index(name)]

    @property
    def request_ids(self) -> tuple[str, ...]:
        return self.column("request_id")

    def select(self, places: Sequence[int]) -> Packed[T]:
        """The items at these places, in the message's order."""
        if len(places) == len(self):
            return self
        chosen = np.zeros(len(self), bool)
        chosen[list(places)] = True
        arrays = tuple(array[np.repeat(chosen, self.lengths)] for array in self.arrays)
        columns = tuple(tuple(itertools.compress(column, chosen)) for column in self.columns)
        return Packed(self.kind, self.lengths[chosen], arrays, columns)

    def unpack(self) -> list[T]:
        spans = [slice(*span) for span in itertools.pairwise([0, *np.cumsum(self.lengths).tolist()])]
        parts: list[list[np.ndarray]] = [[array[span] for span in spans] for array in self.arrays]
        items = [self.kind.__new__(self.kind) for _ in spans]
        names = (*_ARRAYS[self.kind], *_COLUMNS[self.kind])
        for name, column in zip(names, (*parts, *self.columns), strict=True):
            # field by field: the constructors of frozen dataclasses take three times as long
            deque(map(getattr(self.kind, name).__set__, items, column), maxlen=0)
        return items


def _from_message(kind: type[T], arrays: list[bytearray], columns: tuple[tuple[Any, ...], ...]) -> Packed[T]:
    dtypes = (np.dtype(np.int64), *_ARRAYS[kind].values())
    lengths, *others = (np.frombuffer(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True))
    return Packed(kind, lengths, tuple(others), columns)


def pack(kind: type[T], items: Sequence[T]) -> Packed[T]:
    arrays = []
    for name, dtype in _ARRAYS[kind].items():
        of_items = [getattr(item, name) for item in items]
        arrays.append(np.concatenate(of_items) if of_items else np.zeros(0, dtype))
    lengths = np.array([len(array) for array in of_items], np.int64)
    columns = tuple(_column(name, items) for name in _COLUMNS[kind])
    return Packed(kind, lengths, tuple(arrays), columns)


def _column(name: str, items: Sequence[Any]) -> tuple[Any, ...]:
    values = map(attrgetter(name), items)
    if name != "sampling":
        return tuple(values)
    # Equal ones become one object, which is pickled once. It would take half the time of a message otherwise.
    known: dict[Any, Any] = {}
    same: dict[int, Any] = {}  # to hash one takes longer than to pickle it
    for value in values:
        if id(value) not in same:
            same[id(value)] = known.setdefault(value, value)
    return tuple(same[id(getattr(item, name))] for item in items)


_NO_COMPLETIONS = pack(Completion, [])


class Answers(NamedTuple):
    """One message to a client."""

    completions: Packed[Completion] | None = None
    failures: Failures = ()
    pieces: Packed[Piece] | None = None


class RequestServer(ConnectedActor):
    """An actor that completes requests. A subclass implements `submit` and `stop_requests`, and calls `answer`."""

    def __init__(self) -> None:
        self._clients: dict[str, Caller] = {}  # by the ids of the requests that have no answer yet
        self._answered = asyncio.Event()  # set by answers, for those who cleared it

    @endpoint
    async def generate_many(self, requests: Packed[GenerationRequest], who: str = "") -> None:
        """Complete these requests; answers are pushed to the caller as they finish. One whose id is in use is refused.
        A message that raises fails its own requests alone. `who`: the client's mesh, for `client_lost`."""
        client = caller.get()
        client.who = who
        accepted: list[GenerationRequest] = []
        refused: list[tuple[str, TitanError]] = []
        for request in requests.unpack():
            if request.request_id in self._clients:
                refused.append((request.request_id, RequestError(f"request id {request.request_id} is already live")))
            else:
                self._clients[request.request_id] = client
                accepted.append(request)
        if refused:
            client.push(Answers(failures=refused))
        try:
            self.submit(accepted)
        except Exception as why:
            _log.exception("a message of a client could not be submitted")
            error = RequestError(f"the requests of one message failed: {type(why).__name__}: {why}")
            self.answer([], [(request.request_id, error) for request in accepted])

    @endpoint
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests; each is answered with the tokens it has. Ids that are not live are ignored."""
        self.stop_requests(request_ids)

    @endpoint
    async def client_lost(self, who: str | None) -> None:
        """The clients of this mesh are gone; None: all clients. Stop their requests. Returns when none is live."""
        request_ids = [each for each, client in self._clients.items() if who in (None, client.who)]
        self.stop_requests(request_ids)
        while any(each in self._clients for each in request_ids):
            self._answered.clear()
            await self._answered.wait()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start on a message's requests. Must not block."""
        raise NotImplementedError

    def stop_requests(self, request_ids: Sequence[str]) -> None:
        """Stop these requests, as in `abort`. Must not block."""
        raise NotImplementedError

    def fail_all(self, error: TitanError) -> None:
        """Every request that has no answer yet fails."""
        self.answer([], [(request_id, error) for request_id in self._clients])

    def answer(self, completions: Sequence[Completion] | Packed[Completion], failures: Failures = ()) -> int:
        """Send each answer to its client, one message per client; returns how many completions were sent. Answers to
        ids that are not live are dropped. Where a message cannot be pickled, its requests fail.
        """
        if not (completions or failures):
            return 0
        if not isinstance(completions, Packed):
            completions = pack(Completion, completions)
        places: defaultdict[Caller | None, list[int]] = defaultdict(list)
        failed: defaultdict[Caller | None, list[tuple[str, TitanError]]] = defaultdict(list)
        for place, request_id in enumerate(completions.request_ids):
            places[self._clients.pop(request_id, None)].append(place)
        for request_id, error in failures:
            failed[self._clients.pop(request_id, None)].append((request_id, error))
        self._answered.set()
        for client in {**places, **failed}:
            if client is None:
                continue
            its, failures = places[client], failed[client]
            try:
                client.push(Answers(completions.select(its) if its else None, failures))
            except Exception as why:
                _log.exception("answers cannot be sent")
                error = RequestError(f"the answer cannot be sent: {type(why).__name__}: {why}")
                ids = [completions.request_ids[place] for place in its] + [each for each, _ in failures]
                client.push(Answers(failures=[(request_id, error) for request_id in ids]))
        return len(completions) - len(places[None])

    def send_pieces(self, pieces: Sequence[Piece]) -> None:
        """Send each piece to its client, one message per client. Pieces of ids that are not live are dropped."""
        to: dict[Caller, list[Piece]] = {}
        for piece in pieces:
            if (client := self._clients.get(piece.request_id)) is not None:
                to.setdefault(client, []).append(piece)
        for client, its in to.items():
            client.push(Answers(pieces=pack(Piece, its)))
            client.flush()  # somebody waits for the first of them


def is_gone(error: TitanError) -> bool:
    """Whether this error of a generator means that it is gone, and not only out of service."""
    return isinstance(error, (ActorGone, GeneratorFailed)) and not isinstance(error, GeneratorNotServing)


class RequestClient(MeshClient):
    """Sends requests to one server. `answered` and `sampled` of a subclass run on the loop and must not raise."""

    def __init__(self, server: Any, *, name: str, who: str = "", is_replaced: bool = False) -> None:
        """`server`: of a `RequestServer`; None: `replace` brings it. `who`: this client's mesh, for `client_lost`."""
        super().__init__(name, [] if server is None else [server], is_replaced=is_replaced)
        self._who = who
        self._open: set[str] = set()  # requests that are not answered yet, aborted or not
        self._tick: list[GenerationRequest] = []  # to be sent at the end of this tick

    def answered(self, completions: Packed[Completion], failures: Failures) -> None:
        """Requests are over."""
        raise NotImplementedError

    def sampled(self, pieces: list[Piece]) -> None:
        """More of open requests was sampled."""
        raise NotImplementedError

    @property
    def connection(self) -> Connection:
        """For other calls to the same actor; they keep their order among the requests."""
        return self.ranks[0]

    def send(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests for this tick's message."""
        if not self._tick:
            asyncio.get_running_loop().call_soon(self._send_tick)
        for request in requests:
            self._open.add(request.request_id)
            self._tick.append(request)

    @property
    def waits(self) -> bool:
        """Whether any request is not answered yet."""
        return bool(self._open)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the server to stop these requests. They are still answered, with the tokens sampled so far."""
        self._send_tick()  # the server would ignore an abort that arrives before its request
        self.connection.tell(RequestServer.abort, request_ids)

    async def disconnect(self) -> None:
        """Disconnect. Open requests fail, and the server stops them."""
        self._send_tick()
        if self._open:
            self.abort(tuple(self._open))
            await asyncio.sleep(0)  # the abort is sent at the end of the tick
        self._fail(list(self._open), ActorFailed(f"{self.name}: the client was closed"))
        for server in self.ranks:
            await server.close()

    def _send_tick(self) -> None:
        requests, self._tick = [each for each in self._tick if each.request_id in self._open], []
        if not requests:
            return
        try:
            self.connection.tell(RequestServer.generate_many, pack(GenerationRequest, requests), self._who)
            self.connection.flush()  # the tick is over
        except Exception as why:  # a field of one of them cannot be pickled
            error = RequestError(f"{self.name}: requests cannot be sent: {type(why).__name__}: {why}")
            self._fail([request.request_id for request in requests], error)

    def _on_lost(self, reason: str) -> None:
        self._fail(list(self._open), ActorGone(f"{self.name}.generate_many: {reason}"))

    def _on_push(self, answers: Answers) -> None:
        if answers.pieces is not None:
            self.sampled(answers.pieces.unpack())
        completions = answers.completions or _NO_COMPLETIONS
        self._open.difference_update(completions.request_ids, (request_id for request_id, _ in answers.failures))
        if completions or answers.failures:
            self.answered(completions, answers.failures)

    def _fail(self, request_ids: Sequence[str], error: TitanError) -> None:
        self._open.difference_update(request_ids)
        if request_ids:
            self.answered(_NO_COMPLETIONS, [(request_id, error) for request_id in request_ids])
