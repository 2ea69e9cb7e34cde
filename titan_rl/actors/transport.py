"""Requests and completions between actors: what arrives in one tick travels together, each answer as it finishes.

Protocol of one target (a router, or rank 0 of a generator). A client connects once, with a call that stays open:

    target.generate_many(reply port, n)       the failure channel: it raises when the target is gone
      reply port ← Answers(requests=(n, port))    where this client's requests are taken
      that port  ← Asked(requests), Asked(aborts, ended)    one message per tick, in order
      reply port ← Answers(pieces)                of requests that stream: what they have sampled by now
      reply port ← Answers(completions, failures)    any number of messages; each request id once
      that port  ← None                       the client leaves, and the call returns

A port costs a third less than a call and needs no return, and half of what a small request costs is messages.

A target that asks others on behalf of its callers (the router) names the caller with the requests. What ends as it
should then goes to the caller straight away, and the one in between hears that it did (`Answers.delivered`): tokens
make one journey less. Failures, and completions that were interrupted and may be continued, go to the one in between
only. It tells its caller now and then what was answered so, because such an answer can be lost: with a generator that
was killed within the millisecond after it told the router. A caller that still misses it then asks once more.

Pieces go to the one in between, which hands them on: it must know what its caller was shown. They are a courtesy: what
is lost of them is in the completion, and they may come after it.

`RequestClient` is the sending side, `reply_desk.ReplyDesk` the answering side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
from monarch.actor import Channel

from titan_rl.actors.calls import bounded
from titan_rl.actors.reply_desk import Answers, Asked
from titan_rl.actors.streams import PieceOrder
from titan_rl.errors import ActorFailed, RequestError, TitanError
from titan_rl.types import Completion, GenerationRequest, Piece
from titan_rl.wire import PackedRequests

LATE_ANSWER_SECONDS = 30.0
"""After a client heard that somebody else answered its request, that answer may still be on its way for this long; then
it counts as lost, and the request is sent once more."""

_log = logging.getLogger(__name__)


class RequestClient:
    """Sends requests to one target and hands every answer to `on_answers`.

    Every sent request id is answered exactly once: by the target, or as a failure when the target is gone. There is no
    bound on the time of an answer: only the target knows what it waits for. Belongs to one event loop.
    """

    def __init__(
        self,
        target: Any,
        *,
        name: str,
        on_answers: Callable[[list[Completion], list[tuple[str, TitanError]]], None],
        on_delivered: Callable[[list[str]], None] = lambda request_ids: None,
        on_pieces: Callable[[list[Piece]], None] = lambda pieces: None,
        late_seconds: float = LATE_ANSWER_SECONDS,
    ) -> None:
        """
        Args:
            target: actor handle with the endpoint `generate_many`.
            name: of the target, for errors.
            on_answers: called on the event loop with what has come in; must not raise.
            on_delivered: the same, with the ids of requests that were answered to their caller.
            on_pieces: the same, with what open requests that stream have sampled.
            late_seconds: see `LATE_ANSWER_SECONDS`.
        """
        self._target = target
        self._name = name
        self._on_answers = on_answers
        self._on_delivered = on_delivered
        self._on_pieces = on_pieces
        self._late_seconds = late_seconds
        self._open: dict[str, tuple[GenerationRequest, bytes | None]] = {}  # the request and its caller
        self._sent_again: set[str] = set()  # of those
        self._outbox: dict[bytes | None, list[GenerationRequest]] = {}  # by caller
        self._aborts: list[str] = []
        self._ended: list[str] = []  # sessions
        self._flushing = False
        self._requests: Any = None  # the target's port, once it has told us
        self._connections = 0
        self._connected: asyncio.Task[None] | None = None
        port, self._receiver = Channel[Any].open()
        self._address = cloudpickle.dumps(port)
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._receive())

    def send(self, requests: Iterable[GenerationRequest], caller: bytes | None = None) -> None:
        """Queue requests for this tick's message.

        Args:
            caller: port of whoever is to have the completions; None: this client.
        """
        outbox = self._outbox.setdefault(caller, [])
        for request in requests:
            self._open[request.request_id] = (request, caller)
            outbox.append(request)
        self._flush_soon()

    def fail(self, error: TitanError) -> None:
        """The target is gone, as somebody else found out: whatever is open fails."""
        self._fail(list(self._open), error)

    def is_open(self, request_id: str) -> bool:
        """Whether the request is not answered yet, aborted or not."""
        return request_id in self._open

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the target to stop working on these; they are still answered (with what was sampled so far)."""
        self._aborts += request_ids
        self._flush_soon()

    def end_sessions(self, session_ids: Iterable[str]) -> None:
        """These conversations are over. A target that is not there any more has forgotten them anyway."""
        if self._requests is not None:
            self._ended += session_ids
            self._flush_soon()

    async def close(self) -> None:
        """Leave. Whatever is open fails, and the target stops working on it."""
        if self._requests is not None:
            self._requests.send(Asked(None, aborts=tuple(self._open)))
            self._requests.send(None)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail(ActorFailed(f"{self._name}: the client was closed"))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(ActorFailed(f"{self._name}: {type(error).__name__}: {error}"))

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._requests is None:
            if self._connected is None:
                self._connected = self._spawn(self._connect())
            return  # the target's first message sends what waits
        outbox, self._outbox = self._outbox, {}
        aborts, self._aborts = self._aborts, []
        ended, self._ended = self._ended, []
        for caller, requests in outbox.items():
            self._ask(requests, caller)
        if aborts or ended:  # after the requests: an abort that overtakes its request is ignored
            self._requests.send(Asked(None, aborts=tuple(aborts), ended=tuple(ended)))

    def _ask(self, requests: list[GenerationRequest], caller: bytes | None) -> None:
        try:
            packed = PackedRequests.pack(requests)
        except Exception as why:  # a token id of more than 32 bits, for one; it must not take the others with it
            if len(requests) > 1:
                for request in requests:
                    self._ask([request], caller)
                return
            request_id = requests[0].request_id
            self._fail(
                [request_id], RequestError(f"request {request_id!r} cannot be sent: {type(why).__name__}: {why}")
            )
            return
        self._requests.send(Asked(packed, caller))

    async def _connect(self) -> None:
        """The connection, for as long as it lasts. The next request after its end makes another one."""
        error: TitanError = ActorFailed(f"{self._name}.generate_many: the connection was ended")
        try:
            self._connections += 1
            call = self._target.generate_many.call_one(self._address, self._connections)
            await bounded(call, what=f"{self._name}.generate_many", seconds=None)
        except TitanError as why:
            error = why
        except Exception as why:
            error = ActorFailed(f"{self._name}.generate_many: {type(why).__name__}: {why}")
        self._connected = self._requests = None
        self._outbox.clear()
        self._aborts.clear()
        self._ended.clear()
        self.fail(error)

    async def _receive(self) -> None:
        while True:
            answers: Answers = await self._receiver.recv()
            try:
                self._hear(answers)
            except Exception as why:  # it is about the requests of this message only
                _log.exception("a message of %s could not be taken", self._name)
                reason = f"its answer could not be taken: {type(why).__name__}: {why}"
                self._fail(list(answers.request_ids()), RequestError(f"{self._name}: {reason}"))

    def _hear(self, answers: Answers) -> None:
        if answers.requests is not None:
            connection, port = answers.requests
            if connection == self._connections and self._connected is not None:  # it has not ended meanwhile
                self._requests = cloudpickle.loads(port)
                self._flush()
        if answers.pieces is not None:
            self._on_pieces([piece for piece in answers.pieces.unpack() if piece.request_id in self._open])
        self._take([] if answers.completions is None else answers.completions.unpack(), answers.failures)
        if answers.delivered:
            self._take_delivered(answers.delivered)

    def _take(self, completions: Sequence[Completion], failures: Sequence[tuple[str, TitanError]]) -> None:
        """Hand on what is not answered yet."""
        completions = [c for c in completions if self._open.pop(c.request_id, None) is not None]
        failures = [f for f in failures if self._open.pop(f[0], None) is not None]
        if completions or failures:
            self._on_answers(completions, failures)

    def _take_delivered(self, request_ids: Sequence[str]) -> None:
        """Somebody else has answered: our callers, whom we need not, or us, and it should be here soon."""
        told: list[str] = []
        mine: list[str] = []
        for request_id in request_ids:
            opened = self._open.get(request_id)
            if opened is not None and opened[1] is None:
                mine.append(request_id)
            elif opened is not None:
                del self._open[request_id]
                told.append(request_id)
        if told:
            self._on_delivered(told)
        if mine:
            asyncio.get_running_loop().call_later(self._late_seconds, self._ask_again, mine)

    def _ask_again(self, request_ids: Sequence[str]) -> None:
        missing = [request_id for request_id in request_ids if request_id in self._open]
        if not missing:
            return
        self._sent_again &= self._open.keys()
        error = ActorFailed(f"{self._name}: the answer was sent twice, but never came")
        self._fail([request_id for request_id in missing if request_id in self._sent_again], error)
        for request, _ in [self._open[request_id] for request_id in missing if request_id in self._open]:
            self._sent_again.add(request.request_id)
            self._outbox.setdefault(None, []).append(request)
        self._flush_soon()

    def _fail(self, request_ids: list[str], error: TitanError) -> None:
        failed = [request_id for request_id in request_ids if self._open.pop(request_id, None) is not None]
        if failed:
            self._on_answers([], [(request_id, error) for request_id in failed])


class CompletionClient:
    """`await generate(request)` and `stream(request)` over a `RequestClient`: what a rollout worker, a gateway and a
    training script use."""

    def __init__(self, target: Any, *, name: str, late_seconds: float = LATE_ANSWER_SECONDS) -> None:
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._pieces: dict[str, asyncio.Queue[Piece | None]] = {}  # None: the completion is there, or will never be
        self._client = RequestClient(
            target,
            name=name,
            on_answers=self._on_answers,
            on_pieces=self._on_pieces,
            late_seconds=late_seconds,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        """The completion of one request. Cancelling the call aborts the engine's work.

        Raises:
            RequestError: the request is invalid, its time was over, or generators died under it.
            GeneratorFailed, ActorFailed: nobody can serve it; the cause is in the message.
        """
        future = self._send(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._client.abort([request.request_id])
            raise
        finally:
            self._futures.pop(request.request_id, None)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        """The tokens of one request in pieces, as they are sampled, and then the whole completion.

        The pieces are the completion: each token once and in order, also when the request went on with another
        generator or other weights. Closing the generator before its end aborts the engine's work.

        Raises:
            RequestError, GeneratorFailed, ActorFailed: as `generate`, at any time.
        """
        request_id = request.request_id
        future = self._send(replace(request, stream_from=0))
        inbox: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._pieces[request_id] = inbox
        future.add_done_callback(lambda _: inbox.put_nowait(None))
        order = PieceOrder()
        try:
            while (piece := await inbox.get()) is not None:
                for new in order.add(piece):
                    yield new
            completion = future.result()
            rest = order.rest(completion)
            if rest is not None:
                yield rest
            yield completion
        finally:
            del self._pieces[request_id]
            self._futures.pop(request_id, None)
            if future.cancel():
                self._client.abort([request_id])
            else:
                future.exception()  # known, or of no interest any more

    def end_sessions(self, session_ids: Iterable[str]) -> None:
        """These conversations are over: a sticky strategy may forget them, once what is live of them has ended."""
        self._client.end_sessions(session_ids)

    async def close(self) -> None:
        await self._client.close()

    def _send(self, request: GenerationRequest) -> asyncio.Future[Completion]:
        request_id = request.request_id
        if self._client.is_open(request_id):  # or its answer is on the way, and would be taken for this one's
            raise RequestError(f"request id {request_id} is in use; an id names one attempt")
        future = self._futures[request_id] = asyncio.get_running_loop().create_future()
        self._client.send((request,))
        return future

    def _on_pieces(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if (inbox := self._pieces.get(piece.request_id)) is not None:
                inbox.put_nowait(piece)

    def _on_answers(self, completions: list[Completion], failures: list[tuple[str, TitanError]]) -> None:
        for completion in completions:
            future = self._futures.get(completion.request_id)
            if future is not None and not future.done():
                future.set_result(completion)
        for request_id, error in failures:
            future = self._futures.get(request_id)
            if future is not None and not future.done():
                future.set_exception(error)
