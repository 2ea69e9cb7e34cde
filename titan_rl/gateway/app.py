"""The OpenAI-compatible HTTP app: any program that speaks that API can talk to the policy.

    key → whose call it is (`visits`)
    body → checked → prompt (renderer) → one request per choice → router → engines → text, tokens, tool calls → body

What always holds:

- A call ends its engine work: answered, refused, failed, or aborted because its client hung up.
- Nothing that a client sends is a 500: what is wrong with it is said in a 4xx, before anything is sent to an engine.
- With `stream` tokens come as they are sampled; see `streaming`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import TitanError
from titan_rl.gateway.access.callers import Door, Visit
from titan_rl.gateway.access.limits import VISIT, Doorkeeper
from titan_rl.gateway.config import GatewayConfig
from titan_rl.gateway.fleet import ClientGone, Fleet, as_finished, unless_gone
from titan_rl.gateway.metrics import Counted, GatewayMetrics
from titan_rl.gateway.openai.errors import CLIENT_GONE, ApiError, JsonResponse, install
from titan_rl.gateway.openai.protocol import ChatCompletionRequest, CompletionRequest
from titan_rl.gateway.openai.requests import check_length, count_prompts, prompt_works
from titan_rl.gateway.openai.responses import Answer, Choice, read_choice
from titan_rl.gateway.openai.streaming import EventStream, events
from titan_rl.gateway.render_thread import Reader
from titan_rl.types import Completion, GenerationRequest

Sampling = AsyncGenerator[tuple[int, Completion], None]

SERVING = "serving"
"""The state of a generator that takes requests (`routing.fleet.GeneratorState.SERVING`)."""
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": what}
    for status, what in {
        400: "The request is invalid; the message says what is wrong.",
        401: "The API key is missing or wrong.",
        403: "The rollout that the key belongs to has no turns or tokens left, or has ended.",
        404: "There is no such model.",
        413: "The body is too long.",
        503: "No generator can serve, or the gateway is being closed; the message has the cause.",
        504: "The request was not finished within `router.request_seconds`.",
    }.items()
}


def build_app(config: GatewayConfig, fleet: Fleet, renderer: Renderer, door: Door, *, max_model_len: int) -> FastAPI:
    """The app, for any ASGI server.

    Args:
        renderer: of the checkpoint that the fleet serves.
        door: who may call, and what becomes of it.
        max_model_len: longest prompt and completion together, in tokens.
    """
    app = FastAPI(title="titan_rl gateway", docs_url=None, redoc_url=None)
    desk = _Desk(config, fleet, renderer, max_model_len=max_model_len)
    install(app)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.post("/v1/chat/completions", responses=ERRORS, response_class=JsonResponse)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """What the policy says next in a conversation."""
        return await desk.answer(f"chatcmpl-{uuid.uuid4().hex}", body, request)

    @app.post("/v1/completions", responses=ERRORS, response_class=JsonResponse)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """How the policy goes on with texts or token ids."""
        return await desk.answer(f"cmpl-{uuid.uuid4().hex}", body, request)

    @app.get("/v1/models", response_class=JsonResponse)
    async def models() -> Response:
        """The one model there is."""
        return JsonResponse({"object": "list", "data": [desk.model]})

    @app.get("/v1/models/{model:path}", responses={404: ERRORS[404]}, response_class=JsonResponse)
    async def model(model: str) -> Response:
        """The one model there is."""
        desk.check_model(model)
        return JsonResponse(desk.model)

    @app.get("/health", responses={503: ERRORS[503]}, response_class=JsonResponse)
    async def health() -> Response:
        """200 while a generator serves."""
        generators = {member.name: member for member in await fleet.fleet_status()}
        if any(member.state == SERVING for member in generators.values()):
            states = {name: {"state": each.state, "version": each.version} for name, each in generators.items()}
            return JsonResponse({"status": "serving", "generators": states})
        reasons = "; ".join(f"{name} is {each.state} {each.last_error}".strip() for name, each in generators.items())
        raise ApiError(503, f"no generator serves: {reasons}", code="engine_unavailable")

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters and gauges for Prometheus."""
        return Response(desk.metrics.exposition(await fleet.fleet_status()), media_type=PROMETHEUS_TEXT)

    paths = frozenset(path for route in app.routes if (path := getattr(route, "path", "")) and "{" not in path)
    app.add_middleware(Doorkeeper, door=door, max_body_bytes=config.max_body_bytes)
    app.add_middleware(Counted, metrics=desk.metrics, paths=paths)  # the last one added sees a call first
    return app


class _Desk:
    """What the two ways to ask for completions have in common."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, renderer: Renderer, *, max_model_len: int) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._fleet = fleet
        self._renderer = renderer
        self._reader = Reader()
        self.metrics = GatewayMetrics()
        self.model = {"id": config.model, "object": "model", "created": int(time.time()), "owned_by": "titan_rl"}

    def check_model(self, name: str) -> None:
        if name != self._config.model:
            raise ApiError(
                404,
                f"there is no model {name!r}; this gateway serves {self._config.model!r}",
                param="model",
                code="model_not_found",
            )

    async def answer(self, call_id: str, body: CompletionRequest | ChatCompletionRequest, request: Request) -> Response:
        """Sample every choice and write the answer, at once or as a stream."""
        self.check_model(body.model)
        visit: Visit = request.scope[VISIT]
        return await unless_gone(self._answer(call_id, body, visit), request.receive, visit.over)

    async def _answer(self, call_id: str, body: CompletionRequest | ChatCompletionRequest, visit: Visit) -> Response:
        self._check_choices(body)
        check_length(body, self._renderer, max_model_len=self._max_model_len)
        prompts = [await self._reader.do(work) for work in prompt_works(body, self._renderer, visit)]
        requests = visit.requests(call_id, prompts, body)
        for option in visit.unheard(body):
            self.metrics.unheard.labels(option).inc()
        answer = Answer(
            call_id=call_id,
            created=int(time.time()),
            model=self._config.model,
            body=body,
            renderer=self._renderer,
        )
        if not body.stream:
            return await self._whole(visit, answer, requests, self._sampling(visit, requests))
        chunks = events(answer, requests, self._fleet, visit, read=self._reader.do, count=self._count)
        return EventStream(await anext(chunks), chunks, visit)

    async def _sampling(self, visit: Visit, requests: list[GenerationRequest]) -> Sampling:
        try:
            async with aclosing(as_finished(self._fleet, requests)) as finished:
                async for each in finished:
                    yield each
        except TitanError as error:
            visit.failed(error)
            raise

    async def _whole(
        self,
        visit: Visit,
        answer: Answer,
        requests: list[GenerationRequest],
        finished: Sampling,
    ) -> Response:
        completions = dict([each async for each in finished])

        def write() -> tuple[list[Choice], JsonResponse]:
            choices = [self._choice(answer, requests, index, completions[index]) for index in range(len(requests))]
            return choices, JsonResponse(answer.whole(choices))

        choices, response = await self._reader.do(write)
        for choice in choices:
            visit.answered(choice, completions[choice.index])
        self._count(answer.usage(choices))
        return response

    def _check_choices(self, body: CompletionRequest | ChatCompletionRequest) -> None:
        prompts, count, most = count_prompts(body), body.n or 1, self._config.max_choices
        if prompts * count > most:
            raise ApiError(400, f"{prompts} prompts × n = {count} are more than {most} completions", param="n")

    def _choice(self, answer: Answer, requests: list[GenerationRequest], index: int, completion: Completion) -> Choice:
        return read_choice(index, requests[index], completion, answer.body, self._renderer)

    def _count(self, usage: dict[str, int]) -> None:
        self.metrics.prompt_tokens.inc(usage["prompt_tokens"])
        self.metrics.completion_tokens.inc(usage["completion_tokens"])
