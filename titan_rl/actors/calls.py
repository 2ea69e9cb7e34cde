"""Calls between actors: bounded in time, failing with the project's own errors.

Above this module nobody sees an exception type of Monarch. A caller's time-out does not cancel the remote work, and it
does not mean that the actor is gone.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, concurrent_endpoint

from titan_rl.errors import ActorFailed, CallTimeout, GeneratorFailed, GeneratorNotServing, TitanError

T = TypeVar("T")


def served(method: Callable[..., Coroutine[Any, Any, T]]) -> Any:
    """An endpoint that runs beside the actor's other messages and always answers.

    `CancelledError` and other `BaseException`s that escape an endpoint leave its caller waiting for ever, so they
    become `ActorFailed` here.
    """

    @functools.wraps(method)
    async def answer(*args: Any, **kwargs: Any) -> T:
        try:
            return await method(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            raise ActorFailed(f"{method.__qualname__} was interrupted by {type(error).__name__}: {error}") from error

    endpoint = concurrent_endpoint(answer)
    endpoint.answer = answer  # for `method_of`
    return endpoint


def method_of(actor: type[Any], endpoint: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The method behind an endpoint that `served` made. Raises ActorFailed: there is none of that name."""
    answer = getattr(getattr(actor, endpoint, None), "answer", None)
    if answer is None:
        raise ActorFailed(f"{actor.__name__} has no endpoint {endpoint}")
    return answer


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
    """Whether the generator that answered so is gone, as opposed to not serving just now."""
    return isinstance(error, (ActorFailed, GeneratorFailed)) and not isinstance(error, GeneratorNotServing)


def gone(error: SupervisionError) -> str:
    """What Monarch says of a process or actor that answers nobody any more, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"the process or actor is gone ({lines[0]})"
