"""Calls between actors: bounded in time, failing with the project's own errors, over one connection per client.

    client ── connect(reply port) ──▶ actor       one Monarch call that stays open: it fails when the actor is gone
    client ◀── the actor's port ──────────
    client ── [(number, endpoint, arguments), …] ──▶    the calls of one tick in one message, in order
    client ◀── [(number, outcome), …] ─────────────     the outcomes of one tick in one message
    client ◀── [(None, item), …] ──────────────────     items that an endpoint pushes to its caller, at any later time
    client ── None ──▶                                  the client disconnects

- Neither end keeps any state of a finished call, nor of a client that has disconnected.
- Every call ends: with its outcome, at its bound, or when the actor is gone. An actor that is gone may be replaced; a
  call that may be made twice then goes to the new one (`mesh_client`). Arguments and outcomes are pickled one by
  one, so what cannot be pickled or unpickled fails its own call only.
- Above this module nobody sees an exception type of Monarch. A caller's time-out does not cancel the remote work, and
  it does not mean that the actor is gone.

It exists for one defect of Monarch 0.7: `call_one` opens a reply port for every call and never frees it. Each call
leaks about 1 KB in the caller (a split port) and 0.3 KB in the actor (a sequence number): gigabytes in a run of a
million groups. With a Monarch that frees them a call may be a `call_one`. What should stay even then is one message per
tick, which makes thousands of small requests cheap, and the port for items that are pushed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, cast

import cloudpickle
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, Channel, PortReceiver, concurrent_endpoint

from titan_rl.errors import ActorFailed, ActorGone, CallTimeout, TitanError
from titan_rl.metrics.timeline import Pulse, memory, timeline

P = ParamSpec("P")
T = TypeVar("T")

DISCONNECT_SECONDS = 1.0
"""How long a client that disconnects waits for the actor to hear of it."""

_log = logging.getLogger(__name__)
_answering: set[asyncio.Task[None]] = set()  # an event loop holds its tasks only weakly


class RemoteMethod(Generic[P, T]):
    """A method that other actors may call by `connection.call(seconds, Actor.method, ...)`."""

    answer: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
    """The method, for a call within the actor's own process."""


def endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> RemoteMethod[P, T]:
    """Make a method an endpoint, which runs beside the actor's other messages."""
    remote = concurrent_endpoint(method)
    remote.answer = method
    return cast("RemoteMethod[P, T]", remote)


async def bounded(call: Awaitable[T], *, what: str, seconds: float | None) -> T:
    """The result of a call of Monarch's own, with the errors of `Connection.call`. `what`: mesh and endpoint."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except ActorError as error:
        cause = error.exception
        if isinstance(cause, TitanError):
            raise cause from error
        raise ActorFailed(f"{what} raised {type(cause).__name__}: {cause}") from error
    except SupervisionError as error:
        raise ActorGone(f"{what}: {_gone(error)}") from error
    except TimeoutError as error:
        raise CallTimeout(f"{what}: no answer within {seconds:g} s") from error


async def recv(receiver: PortReceiver[bytes]) -> Any:
    """The next message of a port. Monarch's own `recv` runs Python in one of Monarch's threads, which waits for this
    thread's interpreter lock: a fifth of what a message costs."""
    return pickle.loads((await receiver._receiver.recv_task().spawn_handle()).decode())


def _dumps(item: object) -> bytes:
    return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)


def _gone(error: BaseException) -> str:
    """Monarch's report of a dead process or actor, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"the process or actor is gone ({lines[0]})"


class Outbox:
    """The sending end of a connection, on either side of it: sends all items of one event-loop tick as one message."""

    def __init__(self, send: Callable[[bytes], None] | None = None) -> None:
        self._send = send
        self._waiting: list[tuple[Any, ...]] = []

    def open(self, send: Callable[[bytes], None]) -> None:
        """Start to send, beginning with the items that were put in before."""
        self._send = send
        self.flush()

    def put(self, item: tuple[Any, ...]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(item)

    def end(self) -> bool:
        """Send what is waiting, and that nothing follows. Returns whether there was a receiver."""
        self.flush()
        if self._send is not None:
            self._send(_dumps(None))
        return self._send is not None

    def flush(self) -> None:
        """End the tick now."""
        if self._send is not None and self._waiting:
            items, self._waiting = self._waiting, []
            self._send(_dumps(items))


class ConnectedActor(Actor):
    """An actor whose endpoints can be called over a `Connection`."""

    _pulses = 0

    async def _handle_undeliverable_message(self, message: object) -> bool:
        """A message to a host or a process that is gone is lost: whoever waits for an answer hears of it otherwise.
        Monarch's default fails the actor that sent it."""
        _log.info("a message could not be delivered: %s", message)
        return True

    @endpoint
    async def pulse(self) -> Pulse:
        """Shows that this actor's event loop lives, unless an actor knows of better progress."""
        self._pulses += 1
        return Pulse(self._pulses, timeline.uptime(), memory())

    @endpoint
    async def serve(self) -> None:
        """An open call is the failure channel: it returns when there is nothing to watch but the process and its pulse.
        Raises ActorFailed: the actor has ended by itself."""

    @endpoint
    async def close(self) -> None:
        """End the work."""

    @endpoint
    async def connect(self, address: bytes) -> None:
        """Answer the calls of the client with this pickled reply port until it disconnects or this process ends."""
        reply = pickle.loads(address)
        port, receiver = Channel[bytes].open()
        reply.send(cloudpickle.dumps(port))
        outcomes = Caller(reply.send)
        caller.set(outcomes)  # for the tasks below
        with suppress(asyncio.CancelledError):  # the actor is being stopped
            while (calls := await recv(receiver)) is not None:
                for number, name, arguments in calls:
                    if number is None:  # told: it does not wait, so it needs no task
                        await _answer(self, number, name, arguments, outcomes)
                        continue
                    task = asyncio.get_running_loop().create_task(_answer(self, number, name, arguments, outcomes))
                    _answering.add(task)
                    task.add_done_callback(_answering.discard)


class Caller(Outbox):
    """The client whose call an endpoint answers. One object per connection."""

    who = ""
    """Name of the client's mesh, if it said so."""

    def push(self, item: object) -> None:
        """Send the client an item that is not the outcome of a call. If the client is gone, the item is lost."""
        self.put((None, _dumps(item)))


caller: ContextVar[Caller] = ContextVar("caller")
"""The client whose call the running endpoint answers."""


class Connection:
    """One client's calls to a `ConnectedActor`, or to the one that replaces it. Belongs to one event loop."""

    def __init__(
        self,
        actor: Any,
        *,
        what: str,
        on_push: Callable[[Any], None] = lambda item: None,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`what`: name of a call in errors: a format string that takes the endpoint, such as `trainer.{} of rank 1`.
        `on_push`: called with each item that an endpoint pushes; must not raise. `on_lost`: called with the reason when
        the actor is gone; calls made before that push nothing more."""
        self._actor = actor
        self._what = what
        self._on_push = on_push
        self._on_lost = on_lost
        self._numbers = itertools.count()
        self._link: _Link | None = None
        self._lost = ""  # why every call fails

    def call(
        self, seconds: float | None, endpoint: RemoteMethod[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Call an endpoint and return its result. The call is sent now, not at the first await: a caller that numbers
        its calls may be cancelled in between. Cancelling a call, or its time-out, does not stop it in the actor.

        `seconds`: bound on the answer; None: only the end of the process bounds it. `endpoint`: by its class, as in
        `Generator.sleep`. Any actor with an endpoint of that name answers.

        Raises ActorGone: the process or actor is gone; CallTimeout: no answer came within `seconds`; any TitanError
        that the endpoint raised, as it is; ActorFailed: the endpoint raised anything else.
        """
        number, name = next(self._numbers), endpoint.answer.__name__
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if (link := self._put(number, name, args, kwargs)) is not None:
            link.open[number] = outcome
            outcome.add_done_callback(lambda _: link.open.pop(number))
        else:
            outcome.set_result(_Failed(ActorGone, f": {self._lost}"))
        return self._result(self._what.format(name), outcome, seconds)

    def tell(self, endpoint: RemoteMethod[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call an endpoint without waiting for an outcome: only what it pushes shows that the call arrived. If it
        fails, the connection is lost, as nobody else would hear of it. If the actor is gone, `on_lost` is called. The
        endpoint must not wait for anything: the calls behind it wait for it."""
        if self._put(None, endpoint.answer.__name__, args, kwargs) is None:
            self._on_lost(self._lost)

    def flush(self) -> None:
        """Send what was called in this tick without waiting for its end."""
        if self._link is not None:
            self._link.outbox.flush()

    async def gone(self) -> None:
        """Raises ActorGone when the actor called last is gone: for who reads its memory, which tells nobody."""
        if self._link is not None:
            await asyncio.wait([self._link.task])
        raise ActorGone(f"{self._what.format('memory')}: {self._lost or 'the process or actor is gone'}")

    def lose(self, reason: str) -> None:
        """The actor is gone: open calls fail now, and so does every call until `replace`."""
        self._lost = reason
        if self._link is not None:
            self.ended(self._link, reason)
        else:
            self._on_lost(reason)

    def replace(self, actor: Any) -> None:
        """From now on this actor is called. Open calls to the one before fail."""
        self.lose("it was replaced")
        self._actor, self._lost = actor, ""

    async def close(self) -> None:
        """Disconnect. Open calls fail."""
        if (link := self._link) is None:
            return
        if link.outbox.end():
            await asyncio.wait([link.task], timeout=DISCONNECT_SECONDS)
        self.ended(link, "the connection was closed")
        await asyncio.gather(link.task, return_exceptions=True)

    def _put(self, number: int | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Link | None:
        """Send a call. None: the actor is gone."""
        arguments = _dumps((args, kwargs))  # raises before anything is changed
        if self._lost:
            return None
        if self._link is None:
            self._link = _Link(self, self._actor)
        self._link.outbox.put((number, name, arguments))
        return self._link

    async def _result(self, what: str, outcome: asyncio.Future[Any], seconds: float | None) -> Any:
        try:
            async with asyncio.timeout(seconds):  # `wait_for` would lose a cancellation that comes with the outcome
                result = await outcome
        except TimeoutError as error:
            raise CallTimeout(f"{what}: no answer within {seconds:g} s") from error
        if isinstance(result, TitanError):
            raise result
        if isinstance(result, _Failed):
            raise result.kind(f"{what}{result.text}")
        return result

    def received(self, link: _Link, number: int | None, pickled: bytes) -> None:
        """The outcome of a call, or (`number` None) an item that an endpoint pushes."""
        if number is None:
            item = pickle.loads(pickled)
            if isinstance(item, (TitanError, _Failed)):
                failure = item.text.strip() if isinstance(item, _Failed) else item
                raise ActorFailed(f"a call without an outcome failed: {failure}")
            return self._on_push(item) if link is self._link else None
        outcome = link.open.get(number)
        if outcome is not None and not outcome.done():
            try:
                outcome.set_result(pickle.loads(pickled))
            except Exception as error:
                why = f" answered what cannot be unpickled: {type(error).__name__}: {error}"
                outcome.set_result(_Failed(ActorFailed, why))

    def ended(self, link: _Link, reason: str) -> None:
        """The link has ended, or must. The next call opens a new one."""
        if self._link is not link:
            return
        self._link = None
        link.task.cancel()
        for outcome in list(link.open.values()):
            if not outcome.done():
                outcome.set_result(_Failed(ActorGone, f": {reason}"))
        self._on_lost(reason)


class _Link:
    """A connection to one actor, until that actor is gone."""

    def __init__(self, connection: Connection, actor: Any) -> None:
        self.outbox = Outbox()
        self.open: dict[int, asyncio.Future[Any]] = {}
        self._connection = connection
        self.task = asyncio.get_running_loop().create_task(self._connect(actor))

    async def _connect(self, actor: Any) -> None:
        port, receiver = Channel[bytes].open()
        reason = "the connection was closed"
        try:
            call = actor.connect.call_one(cloudpickle.dumps(port))
            async with asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(self._receive(receiver))
                await call
                receiving.cancel()
        except* SupervisionError as group:
            reason = _gone(group.exceptions[0])
        except* Exception as group:
            reason = f"{type(group.exceptions[0]).__name__}: {group.exceptions[0]}"
        finally:
            self._connection.ended(self, reason)

    async def _receive(self, receiver: PortReceiver[bytes]) -> None:
        self.outbox.open((await recv(receiver)).send)
        while True:
            for number, pickled in await recv(receiver):
                self._connection.received(self, number, pickled)


class _Failed(NamedTuple):
    """The outcome of a call that did not raise a `TitanError` itself, and yet failed."""

    kind: type[TitanError]
    text: str
    """Behind the call's name."""


async def _answer(actor: Actor, number: int | None, name: str, arguments: bytes, outcomes: Outbox) -> None:
    """Run one call in the actor."""
    failed = True
    try:
        answer = getattr(getattr(type(actor), name, None), "answer", None)
        if answer is None:
            raise ActorFailed(f"{type(actor).__name__} has no endpoint {name}")
        args, kwargs = pickle.loads(arguments)
        outcome, failed = _dumps(await answer(actor, *args, **kwargs)), False
    except TitanError as error:
        outcome = _dumps(error)
    except BaseException as error:  # a cancellation, too: if it escaped, the caller would wait for ever
        _log.exception("%s.%s raised", type(actor).__name__, name)
        outcome = _dumps(_Failed(ActorFailed, f" raised {type(error).__name__}: {error}"))
    if failed or number is not None:
        outcomes.put((number, outcome))
