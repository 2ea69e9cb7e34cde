"""Calls between actors: bounded in time, failing with the project's own errors.

Above this module nobody sees an exception type of Monarch. A caller's time-out does not cancel the remote work, and it
does not mean that the actor is gone.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, concurrent_endpoint

from titan_rl.errors import ActorFailed, CallTimeout, GeneratorFailed, GeneratorNotServing, TitanError

P = ParamSpec("P")
T = TypeVar("T")


class Endpoint(Generic[P, T]):
    """A method that other actors may call: `connection.call(seconds, Actor.method, ...)` checks its arguments."""

    answer: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
    """The method, for a call within the actor's own process."""


def served(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Endpoint[P, T]:
    """Make a method an endpoint, which runs beside the actor's other messages and always answers.

    `CancelledError` and other `BaseException`s that escape an endpoint leave its caller waiting for ever, so they
    become `ActorFailed` here.
    """

    @functools.wraps(method)
    async def answer(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            raise ActorFailed(f"{method.__qualname__} was interrupted by {type(error).__name__}: {error}") from error

    endpoint = concurrent_endpoint(answer)
    endpoint.answer = answer
    return cast("Endpoint[P, T]", endpoint)


async def bounded(call: Awaitable[T], *, what: str, seconds: float | None) -> T:
    """The call's result.

    Args:
        call: a Monarch future.
        what: the mesh and the endpoint, for the error.
        seconds: bound on the answer; None for a call that stays open and is itself a failure channel.

    Raises:
        TitanError: the remote endpoint raised one; it comes through as it is.
        ActorFailed: the endpoint raised anything else, or the process is gone.
        CallTimeout: no answer came in time.
    """

    try:
        async with asyncio.timeout(seconds):
            return await call
    except ActorError as error:
        cause = error.exception
        if isinstance(cause, TitanError):
            raise cause from error
        raise ActorFailed(f"{what} raised {type(cause).__name__}: {cause}") from error
    except SupervisionError as error:
        raise ActorFailed(f"{what}: {gone(error)}") from error
    except TimeoutError as error:
        raise CallTimeout(f"{what}: no answer within {seconds:g} s") from error


def is_fatal(error: TitanError) -> bool:
    """Whether this error means that the generator is gone, and not only out of service."""
    return isinstance(error, (ActorFailed, GeneratorFailed)) and not isinstance(error, GeneratorNotServing)


def gone(error: SupervisionError) -> str:
    """Monarch's report of a dead process or actor, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"the process or actor is gone ({lines[0]})"
