"""A generator whose every move a test decides: no engine, real actor messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from titan_rl.actors.connection import served
from titan_rl.actors.requests import RequestServer
from titan_rl.errors import ActorGone, GeneratorFailed, WeightsError
from titan_rl.types import NO_VERSION, Completion, FinishReason, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import Manifest, Publication, PullReport


def publication(step: int, incarnation: int = 0) -> Publication:
    return Publication(
        channel="policy",
        version=PolicyVersion(incarnation, step),
        manifest=Manifest(entries=(), nbytes=8),
        location="nowhere",
    )


class ScriptedGenerator(RequestServer):
    """Takes requests and pulls like rank 0 of a generator; they end when the test says so.

    Requests run until `finish`; an aborted one comes back with the tokens that `progress` gave it, and one that streams
    has handed them out. Pulls end at once
    unless `hold_pulls`, and fail as often as `fail_pulls` says.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[str, GenerationRequest] = {}
        self._progress: dict[str, int] = {}
        self._handed_out: dict[str, int] = {}
        self._version: PolicyVersion | None = None
        self._pulls: list[str] = []
        self._pulling = 0
        self._failures = 0
        self._fatal = False
        self._may_pull = asyncio.Event()
        self._may_pull.set()
        self._changed = asyncio.Event()  # set at the next change
        self._asleep = False
        self.failed = ""

    # What a router calls.

    def take(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._live[request.request_id] = request
        self._notify()

    def give_up(self, request_ids: Sequence[str]) -> None:
        self._answer([each for each in request_ids if each in self._live], FinishReason.ABORT, self._progress)

    @served
    async def pull_model_state_dict(self, publication: Publication, *, go_back: bool = False) -> PullReport:
        return await self._pull(publication)

    @served
    async def wake_up(self, publication: Publication) -> PullReport:
        self._asleep = False
        return await self._pull(publication)

    @served
    async def sleep(self) -> int:
        self._asleep = True
        self._answer(list(self._live), FinishReason.ABORT, self._progress)
        return 0

    @served
    async def fail(self, reason: str) -> None:
        self.failed = reason
        self._notify()

    # What a test calls.

    @served
    async def until_failed(self) -> str:
        await self._until(lambda: bool(self.failed))
        return self.failed

    @served
    async def hold_pulls(self) -> None:
        self._may_pull.clear()

    @served
    async def release_pulls(self) -> None:
        self._may_pull.set()

    @served
    async def fail_pulls(self, times: int, fatal: bool = False) -> None:
        """A fatal failure says that the generator is gone, and answers no request."""
        self._failures, self._fatal = times, fatal

    @served
    async def progress(self, tokens: int) -> None:
        """Every running request has sampled so many tokens by now."""
        self._progress = dict.fromkeys(self._live, tokens)
        pieces = []
        for request in self._live.values():
            if request.streams:
                start = self._handed_out.get(request.request_id, 0)
                self._handed_out[request.request_id] = tokens
                pieces.append(
                    Piece(
                        request_id=request.request_id,
                        offset=request.stream_from + start,
                        token_ids=_tokens(request, start, tokens),
                        logprobs=np.full(tokens - start, -0.5, np.float32),
                        versions=np.full(tokens - start, self._encoded(), np.int64),
                    )
                )
        self.hand_out(pieces)

    @served
    async def die(self) -> None:
        """Every request fails as those of a generator that is gone."""
        lost, self._live = list(self._live), {}
        self.answer([], [(request_id, GeneratorFailed("it was killed")) for request_id in lost])

    @served
    async def finish(self, request_ids: list[str], tokens: int) -> None:
        self._answer(request_ids, FinishReason.STOP, dict.fromkeys(request_ids, tokens))

    @served
    async def wait_for_requests(self, count: int) -> dict[str, GenerationRequest]:
        """The live requests, once there are so many."""
        await self._until(lambda: len(self._live) == count)
        return dict(self._live)

    @served
    async def wait_for_request(self, request_id: str) -> None:
        """Until this one runs here."""
        await self._until(lambda: request_id in self._live)

    @served
    async def wait_for_pull(self) -> None:
        await self._until(lambda: self._pulling > 0)

    @served
    async def pulls(self) -> list[str]:
        """Versions that were asked for, in order."""
        return self._pulls

    async def _pull(self, publication: Publication) -> PullReport:
        self._pulls.append(str(publication.version))
        self._pulling += 1
        self._notify()
        await self._may_pull.wait()
        self._pulling -= 1
        if self._failures:
            self._failures -= 1
            if self._fatal:
                raise ActorGone("it was killed in its pull")
            self._answer(list(self._live), FinishReason.ABORT, self._progress)
            raise WeightsError("lm_head.weight is not what was published")
        flying = len(self._live)
        self._version = publication.version
        return PullReport(
            version=publication.version,
            seconds_waited=0.0,
            seconds_copied=0.0,
            seconds_verifying=0.0,
            bytes=8,
            requests_in_flight=flying,
        )

    def _answer(self, request_ids: list[str], reason: FinishReason, tokens: dict[str, int]) -> None:
        completions = []
        for request_id in request_ids:
            request = self._live.pop(request_id)
            count = tokens.get(request_id, 0)
            completions.append(
                Completion(
                    request_id=request_id,
                    token_ids=_tokens(request, 0, count),
                    logprobs=np.full(count, -0.5, np.float32),
                    versions=np.full(count, self._encoded(), np.int64),
                    finish_reason=reason,
                )
            )
        self.answer(completions)
        self._notify()

    def _encoded(self) -> int:
        return NO_VERSION if self._version is None else self._version.encode()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def _tokens(request: GenerationRequest, start: int, end: int) -> np.ndarray:
    """A token is its position in prompt and completion."""
    first = len(request.prompt_token_ids)
    return np.arange(first + start, first + end, dtype=np.int32)
