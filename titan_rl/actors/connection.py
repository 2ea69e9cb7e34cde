"""Repeated calls to one actor over one connection. Neither end keeps any state of a finished call.

    client ── connect(reply port) ──▶ actor       one Monarch call that stays open: it fails when the actor is gone
    client ◀── the actor's port ──────────
    client ── [(number, endpoint, arguments), …] ──▶    the calls of one tick in one message, in order
    client ◀── [(number, outcome), …] ─────────────     the outcomes of one tick in one message
    client ◀── [(None, item), …] ──────────────────     items that an endpoint pushes to its caller, at any later time

Monarch's own `call_one` opens a reply port for every call, and Monarch 0.7 never frees such a port. Each call leaks
about 1 KB in the caller (a split port) and 0.3 KB in the actor (a sequence number): gigabytes in a run of a million
groups.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import cloudpickle
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, Channel

from titan_rl.actors.calls import Endpoint, gone, served
from titan_rl.errors import ActorFailed, CallTimeout, TitanError

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class ConnectedActor(Actor):
    """An actor whose `served` endpoints can be called over a `Connection`."""

    @served
    async def connect(self, address: bytes) -> None:
        """Answer one client's calls until this process ends.

        Args:
            address: the client's reply port, pickled.
        """
        reply = pickle.loads(address)
        port, receiver = Channel[bytes].open()
        reply.send(cloudpickle.dumps(port))
        outcomes = _Outbox(reply.send)
        _caller.set(Caller(outcomes))  # for the tasks below
        tasks: set[asyncio.Task[None]] = set()  # an event loop holds its tasks only weakly
        with suppress(asyncio.CancelledError):  # the actor is being stopped
            while True:
                for call in pickle.loads(await receiver.recv()):
                    task = asyncio.get_running_loop().create_task(_answer(self, call, outcomes))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)


class Caller:
    """The client whose call an endpoint answers. One object per connection."""

    def __init__(self, outbox: _Outbox) -> None:
        self._outbox = outbox

    def push(self, item: object) -> None:
        """Send the client an item that is not the outcome of a call. If the client is gone, the item is lost."""
        self._outbox.put(pickle.dumps((None, item)))


_caller: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """The client whose call the running endpoint answers."""
    return _caller.get()


class Connection:
    """One client's calls to one `ConnectedActor`. Belongs to one event loop; the first call connects.

    Every call ends: with its outcome, at its bound, or when the actor is gone.
    """

    def __init__(
        self,
        actor: Any,
        *,
        what: str,
        on_push: Callable[[Any], None] = lambda item: None,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """
        Args:
            actor: handle of one actor.
            what: name of a call in errors: a format string that takes the endpoint, such as `trainer.{} of rank 1`.
            on_push: called with each item that an endpoint pushes; must not raise.
            on_lost: called with the reason when the actor is gone. Calls made before that push nothing more.
        """
        self._actor = actor
        self._what = what
        self._on_push = on_push
        self._on_lost = on_lost
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # with the endpoint's name
        self._outbox: _Outbox | None = None
        self._connected: asyncio.Task[None] | None = None

    def call(
        self, seconds: float | None, endpoint: Endpoint[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Call an endpoint and return its result. The call is sent now, not at the first await: a caller that numbers
        its calls may be cancelled in between. Cancelling a call, or its time-out, does not stop it in the actor.

        Args:
            seconds: bound on the answer; None: only the end of the process bounds it.
            endpoint: by its class, as in `Generator.sleep`. Any actor with a served method of that name answers.

        Raises:
            TitanError: the endpoint raised one; it comes through as it is.
            ActorFailed: it raised anything else, or the process is gone.
            CallTimeout: no answer came within `seconds`.
        """
        number, name = next(self._numbers), endpoint.answer.__name__
        self._put((number, name, args, kwargs))
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = (name, outcome)
        outcome.add_done_callback(lambda _: self._open.pop(number))
        return self._result(self._what.format(name), outcome, seconds)

    def tell(self, endpoint: Endpoint[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call an endpoint without waiting for an outcome. Only what it pushes, or `on_lost`, shows whether the call
        arrived."""
        self._put((None, endpoint.answer.__name__, args, kwargs))

    async def close(self) -> None:
        """Disconnect. Open calls fail."""
        if self._connected is not None:
            self._connected.cancel()
            await asyncio.gather(self._connected, return_exceptions=True)

    def _put(self, call: tuple[int | None, str, tuple[Any, ...], dict[str, Any]]) -> None:
        item = pickle.dumps(call)  # raises before anything is changed
        if self._outbox is None:
            self._outbox = _Outbox()
            self._connected = asyncio.get_running_loop().create_task(self._connect(self._outbox))
        self._outbox.put(item)

    async def _result(self, what: str, outcome: asyncio.Future[Any], seconds: float | None) -> Any:
        try:
            async with asyncio.timeout(seconds):  # `wait_for` would lose a cancellation that comes with the outcome
                result = await outcome
        except TimeoutError as error:
            raise CallTimeout(f"{what}: no answer within {seconds:g} s") from error
        if isinstance(result, TitanError):
            raise result
        if isinstance(result, _Raised):
            raise ActorFailed(f"{what} {result.text}")
        return result

    async def _connect(self, outbox: _Outbox) -> None:
        """Hold the connection open until it ends. The next call after that opens a new one."""
        port, receiver = Channel[bytes].open()
        reason = "the connection was closed"
        try:
            call = self._actor.connect.call_one(cloudpickle.dumps(port))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(receiver, outbox))
                tasks.create_task(_ended(call))
        except* SupervisionError as group:
            reason = gone(group.exceptions[0])
        except* Exception as group:
            reason = f"{type(group.exceptions[0]).__name__}: {group.exceptions[0]}"
        finally:
            self._outbox = None
            for name, outcome in self._open.values():
                if not outcome.done():
                    outcome.set_exception(ActorFailed(f"{self._what.format(name)}: {reason}"))
            self._on_lost(reason)

    async def _receive(self, receiver: Any, outbox: _Outbox) -> None:
        outbox.open(pickle.loads(await receiver.recv()).send)
        while True:
            for answer in pickle.loads(await receiver.recv()):
                number, result = pickle.loads(answer)
                if number is None:
                    self._on_push(result)
                    continue
                _, outcome = self._open.get(number, ("", None))
                if outcome is not None and not outcome.done():
                    outcome.set_result(result)


@dataclass(frozen=True, slots=True)
class _Raised:
    """The outcome of an endpoint that raised an error which is not a `TitanError`."""

    text: str


class _Outbox:
    """Sends all items of one event-loop tick as one message. Belongs to one event loop."""

    def __init__(self, send: Callable[[bytes], None] | None = None) -> None:
        self._send = send
        self._waiting: list[bytes] = []

    def open(self, send: Callable[[bytes], None]) -> None:
        """Start to send, beginning with the items that were put in before."""
        self._send = send
        self._flush()

    def put(self, item: bytes) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(item)

    def _flush(self) -> None:
        if self._send is not None and self._waiting:
            self._send(pickle.dumps(self._waiting))
            self._waiting = []


async def _answer(actor: Actor, call: bytes, outcomes: _Outbox) -> None:
    """Run one call in the actor."""
    number, name, args, kwargs = pickle.loads(call)
    outcome: Any
    try:
        answer = getattr(getattr(type(actor), name, None), "answer", None)
        if answer is None:
            raise ActorFailed(f"{type(actor).__name__} has no endpoint {name}")
        outcome = await answer(actor, *args, **kwargs)
    except TitanError as error:
        outcome = error
    except Exception as error:
        _log.exception("%s.%s raised", type(actor).__name__, name)
        outcome = _Raised(f"raised {type(error).__name__}: {error}")
    if number is not None:
        outcomes.put(pickle.dumps((number, outcome)))


async def _ended(call: Any) -> None:
    await call  # create_task does not accept a Monarch future
