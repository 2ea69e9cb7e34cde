"""Tokens per second through the gateway, against its router directly and against vLLM's own `api_server`.

    python scripts/bench/gateway.py [--rounds 5] [--generators 2]

64 clients ask for 128 tokens each, once per round, not streaming. Gateway and api_server serve the same 3.2M-parameter
policy in float32, with the same limits, and are called by the same light client; the router gets the same requests
from this process. They take turns, so that a change of the machine's speed hits all of them; ratios are medians over
the rounds. `ttft_*` is the time from sending a call to the first event of its stream of 128 tokens, at one client:
both servers send tokens as they are sampled. `streaming_*` are tokens per second when all 64 clients stream. `vllm_*`
is what vLLM's own benchmark client (`vllm bench serve`) says of as many streams, of prompts that it draws itself.
`…_one` is of one generator: at the end all others are put to sleep.

Both compute with vLLM's packed copies of the weights, as `titan-rl serve` does, with one thread per engine. Both have
the whole machine: the api_server its one engine, the gateway a fleet of `--generators`.

As little HTTP client as there can be: what a server is measured with must cost next to nothing itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from parts.fleet import POLICY, PROMPT_TOKENS, make_request
from parts.table import print_report

from titan_rl.actors.router import GeneratorRouter
from titan_rl.config import RunConfig, ServeConfig
from titan_rl.gateway.config import GatewayConfig
from titan_rl.generation.config import GeneratorConfig
from titan_rl.policy.config import PolicyConfig
from titan_rl.policy.models.tiny import model_directory
from titan_rl.run.start import bring_up
from titan_rl.types import GenerationRequest


class LightClient:
    """One connection that stays open; one call at a time."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def _streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof():  # servers end idle connections
            await self.close()
            self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        return self._reader, self._writer

    async def _send(self, path: str, body: dict[str, Any]) -> asyncio.StreamReader:
        """Send a call and read the head of its answer, which must be a 200."""
        reader, writer = await self._streams()
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self._head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if not self._head.startswith("http/1.1 200"):
            raise RuntimeError(f"{self._head}{await reader.read(2000)!r}")
        return reader

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, which has a length."""
        reader = await self._send(path, body)
        length = int(self._head.partition("content-length:")[2].split("\r\n")[0])
        return json.loads(await reader.readexactly(length))

    async def seconds_to_first_text(self, path: str, body: dict[str, Any]) -> float:
        """From sending a streamed call to its first event. Ends the connection."""
        await self._streams()
        started = time.perf_counter()
        reader = await self._send(path, {**body, "stream": True})
        await reader.readuntil(b"data: ")
        seconds = time.perf_counter() - started
        while not (await reader.readline()).startswith(b"data: [DONE]"):
            pass
        await self.close()
        return seconds

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


CLIENTS, NEW_TOKENS, LENGTH = 64, 128, 256
MODEL, PATH = "policy", "/v1/completions"
START_SECONDS = 300.0
VLLM_VARIABLES = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ROUTER, GATEWAY, API_SERVER = "router", "gateway", "api_server"
NUMBERS = {ROUTER: 0, GATEWAY: 1, API_SERVER: 2}
"""Part of the prompts' seed: gateway and router share a generator, and no prefix cache is to help."""


def requests_of(contender: str, round_number: int, count: int = CLIENTS) -> list[GenerationRequest]:
    return [
        make_request(
            f"{contender}-{round_number}-{index}", new_tokens=NEW_TOKENS, seed=(NUMBERS[contender], round_number, index)
        )
        for index in range(count)
    ]


def body_of(request: GenerationRequest) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": request.prompt_token_ids.tolist(),
        "max_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "seed": request.seed,
        "ignore_eos": True,
    }


@asynccontextmanager
async def api_server(model_path: Path, log: Any) -> AsyncIterator[str]:
    """vLLM's own server on the same model; yields its URL once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = f"--port {port} --host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len {LENGTH} "
    arguments += f"--max-num-seqs {CLIENTS} --block-size 32 --kv-cache-memory-bytes {256 << 20} "
    # seeded requests and chunked prefill do not go together on CPU
    arguments += f"--served-model-name {MODEL} --no-enable-chunked-prefill --disable-uvicorn-access-log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path)]
    process = subprocess.Popen([*command, *arguments.split()], env=VLLM_VARIABLES, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        async with httpx.AsyncClient() as http:
            while True:
                try:
                    (await http.get(f"{url}/health")).raise_for_status()
                    break
                except httpx.HTTPError as error:
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise RuntimeError(f"api_server did not come up:\n{log.read()[-4000:]}") from error
                    await asyncio.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


async def through_http(clients: list[LightClient], requests: list[GenerationRequest]) -> int:
    """Tokens that came back."""
    answers = await asyncio.gather(
        *(client.call(PATH, body_of(request)) for client, request in zip(clients, requests, strict=True))
    )
    return sum(answer["usage"]["completion_tokens"] for answer in answers)


VLLM_CLIENT = """
import sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
serve.add_cli_args(parser := FlexibleArgumentParser())
serve.main(parser.parse_args(sys.argv[1:]))
"""  # the command `vllm` does not start where its package is called vllm-cpu


async def by_vllms_client(url: str, model_path: Path, seed: int) -> dict[str, float]:
    """What it reports."""
    with tempfile.TemporaryDirectory() as directory:
        options = f"--backend openai --base-url {url} --endpoint {PATH} --model {MODEL} --tokenizer {model_path} "
        options += (
            f"--dataset-name random --random-input-len {PROMPT_TOKENS} --random-output-len {NEW_TOKENS} --seed {seed} "
        )
        options += f"--num-prompts {CLIENTS} --max-concurrency {CLIENTS} --ignore-eos --disable-tqdm --save-result "
        options += f"--result-dir {directory} --result-filename result.json"
        command = [sys.executable, "-c", VLLM_CLIENT, *options.split()]
        process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-2, env=VLLM_VARIABLES)
        output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(output.decode()[-4000:])
        result: dict[str, float] = json.loads((Path(directory) / "result.json").read_text())
    assert result["completed"] == CLIENTS and result["total_output_tokens"] == CLIENTS * NEW_TOKENS, result
    return result


async def streamed(url: str, requests: list[GenerationRequest]) -> tuple[list[float], float]:
    """All at once, each over a connection of its own: seconds to the first event of each, and until all have ended."""
    started = time.perf_counter()
    first = [LightClient(url).seconds_to_first_text(PATH, body_of(request)) for request in requests]
    return await asyncio.gather(*first), time.perf_counter() - started


async def measure(rounds: int, generators: int) -> None:
    config = RunConfig(
        policy=PolicyConfig(tiny=POLICY),
        generator=GeneratorConfig(count=generators, max_model_len=LENGTH, max_num_seqs=CLIENTS, linear="packed"),
    )
    with tempfile.TemporaryFile("w+") as log:
        async with (
            bring_up(ServeConfig.of(config, GatewayConfig(port=0, model=MODEL))) as up,
            api_server(model_directory(config), log) as api_url,
        ):

            async def through_router(requests: list[GenerationRequest]) -> int:
                completions = await asyncio.gather(*map(up.router.generate, requests))
                return sum(len(completion.token_ids) for completion in completions)

            urls = {GATEWAY: up.gateway.url, API_SERVER: api_url}
            clients = {name: [LightClient(url) for _ in range(CLIENTS)] for name, url in urls.items()}
            contenders: dict[str, Callable[[list[GenerationRequest]], Awaitable[int]]] = {
                ROUTER: through_router,
                GATEWAY: lambda requests: through_http(clients[GATEWAY], requests),
                API_SERVER: lambda requests: through_http(clients[API_SERVER], requests),
            }
            speeds: dict[str, list[float]] = {name: [] for name in contenders}
            streaming: dict[str, list[float]] = {name: [] for name in urls}
            first: dict[str, list[float]] = {name: [] for name in urls}
            for number in range(rounds + 1):  # the first round warms everything up
                for name in list(contenders)[:: 1 if number % 2 else -1]:
                    requests = requests_of(name, number)
                    started = time.perf_counter()
                    tokens = await contenders[name](requests)
                    seconds = time.perf_counter() - started
                    assert tokens == CLIENTS * NEW_TOKENS, f"{name} gave {tokens} tokens"
                    if number:
                        speeds[name].append(tokens / seconds)
                    if name in urls:
                        alone, *crowd = requests_of(name, rounds + 1 + number, CLIENTS + 1)
                        (waited,), _ = await streamed(urls[name], [alone])
                        _, seconds = await streamed(urls[name], crowd)
                        if number:
                            first[name].append(waited * 1e3)
                            streaming[name].append(CLIENTS * NEW_TOKENS / seconds)
                print(f"round {number} of {rounds} done", flush=True)
            told: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
            for number in range(rounds):
                for name, url in list(urls.items())[:: 1 if number % 2 else -1]:
                    told[name].append(await by_vllms_client(url, model_directory(config), number))
            _, *others = await up.router.fleet_status()
            for other in others:
                await up.router.call(GeneratorRouter.sleep, other.name)
            one: dict[str, list[float]] = {name: [] for name in urls}
            for number in range(rounds):
                for name in list(urls)[:: 1 if number % 2 else -1]:
                    requests = requests_of(name, 3 * (rounds + 1) + number)
                    started = time.perf_counter()
                    one[name].append(await contenders[name](requests) / (time.perf_counter() - started))
            for client in [*clients[GATEWAY], *clients[API_SERVER]]:
                await client.close()

    def ratio(other: str, of: dict[str, list[float]] = speeds) -> float:
        return statistics.median(mine / its for mine, its in zip(of[GATEWAY], of[other], strict=True))

    figures: dict[str, Any] = {
        "clients": CLIENTS,
        "generators": generators,
        "new_tokens": NEW_TOKENS,
        "rounds": rounds,
        "ratio_to_router": round(ratio(ROUTER), 3),
        "ratio_to_api_server": round(ratio(API_SERVER), 3),
        "ratio_to_api_server_one": round(ratio(API_SERVER, one), 3),
        **{f"tokens_per_second_{name}": round(statistics.median(each)) for name, each in speeds.items()},
        **{f"ttft_ms_{name}": round(statistics.median(each), 1) for name, each in first.items()},
        "ttft_ratio_to_api_server": round(ratio(API_SERVER, first), 3),
        **{f"streaming_tokens_per_second_{name}": round(statistics.median(each)) for name, each in streaming.items()},
        "streaming_ratio_to_api_server": round(ratio(API_SERVER, streaming), 3),
    }
    for told_as, what in (("vllm_tokens_per_second", "output_throughput"), ("vllm_ttft_ms", "median_ttft_ms")):
        values = {name: [each[what] for each in theirs] for name, theirs in told.items()}
        figures |= {f"{told_as}_{name}": round(statistics.median(each), 1) for name, each in values.items()}
        figures[f"{told_as}_ratio"] = round(ratio(API_SERVER, values), 3)
    rows: list[list[Any]] = [
        [
            name,
            statistics.median(each),
            figures.get(f"ratio_to_{name}", 1.0),
            figures.get(f"ttft_ms_{name}", "-"),
            figures.get(f"streaming_tokens_per_second_{name}", "-"),
        ]
        for name, each in speeds.items()
    ]
    header = ["", "tokens/s", "gateway ÷ it", "first event, ms", "streaming, tokens/s"]
    print_report(f"{CLIENTS} clients × {NEW_TOKENS} tokens", header, rows, figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--generators", type=int, default=2, help="behind the gateway; 2 is what a run has")
    options = parser.parse_args()
    asyncio.run(measure(options.rounds, options.generators))
