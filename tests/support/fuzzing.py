"""schemathesis against a gateway's own OpenAPI description."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
from pathlib import Path

import httpx

from support.gateway import MODEL, until_idle
from titan_rl.supervision.supervisor import Supervisor

ANSWERED = ("/v1/chat/completions", "/v1/completions")
REFUSED = (*ANSWERED, "/v1/responses", "/v1/messages", f"/v1beta/models/{MODEL}:generateContent")
"""A text that the symbols can write is seldom made up."""
EXAMPLES = 20
"""Per operation."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
SECONDS = 400


async def fuzz(up: Supervisor, directory: Path, key: str = "", *, phases: str = "examples,coverage,fuzzing") -> str:
    """No request is a server error, gets an answer that is not described, or leaves work behind, and some get through.
    Returns the metrics afterwards.

    Args:
        directory: schemathesis keeps there what it found.
        phases: of schemathesis; the coverage of every bound of the schema takes a minute.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=up.gateway.url, headers=headers) as http:
        description = (await http.get("/openapi.json")).json()
        only = {"type": "string", "enum": [MODEL]}  # with another model a request gets no further
        for schema in description["components"]["schemas"].values():
            if "model" in schema.get("required", ()):
                schema["properties"]["model"] = only
        for operation in (each for path in description["paths"].values() for each in path.values()):
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"] = only
        file = directory / "openapi.json"
        file.write_text(json.dumps(description))
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", up.gateway.url),
            *("--checks", CHECKS, "--mode", "all", "--phases", phases),
            *(word for name, value in headers.items() for word in ("--header", f"{name}: {value}")),
            *("--max-examples", str(EXAMPLES), "--seed", "6", "--request-timeout", str(SECONDS)),
        ]
        run = functools.partial(subprocess.run, command, cwd=directory, capture_output=True, text=True, timeout=SECONDS)
        ended = await asyncio.to_thread(run)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        await until_idle(up)
        metrics = (await http.get("/metrics")).text
    for status, paths in (("200", ANSWERED), ("400", REFUSED)):  # it got through, and it was refused
        for path in paths:
            assert f'calls_total{{path="{path}",status="{status}"}}' in metrics, metrics
    assert 'status="5' not in metrics
    return metrics
