"""The calculator task as its program plays it, against a server that answers what a test wrote down (2 s)."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from titan_rl.environments.base import Example, Message
from titan_rl.environments.programs import run_command
from titan_rl.importing import import_file
from titan_rl.types import Endpoint

_task = import_file(Path(__file__).resolve().parents[2] / "rl_configs" / "tool_sum.py")
ToolSum, ToolSumAgent = _task.ToolSum, _task.ToolSumAgent
EXAMPLE = Example(prompt=(Message("user", "12+35="),), answer="47")


def says(content):
    return {"role": "assistant", "content": content}


def calls(expression, call_id="call-1"):
    function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    return {**says(None), "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


@contextmanager
def served(*answers):
    """An endpoint that gives these answers in order, then errors; and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.headers, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            known = len(asked) <= len(answers)
            body = completion(answers[len(asked) - 1]) if known else {"error": {"message": "the rollout has ended"}}
            self.send_response(200 if known else 400)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield Endpoint(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="key", model="policy"), asked
        finally:
            server.shutdown()


def completion(message):
    finish_reason = "tool_calls" if "tool_calls" in message else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}


def test_the_program_calls_the_calculator_and_prints_the_answer():
    with served(calls("12+35"), says("47")) as (endpoint, asked):
        assert ToolSumAgent().play(EXAMPLE, endpoint) == "47\n"
    (headers, first), (_, second) = asked
    assert headers["Authorization"] == "Bearer key" and first["model"] == "policy"
    assert first["messages"] == [{"role": "user", "content": "12+35="}]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculate"]
    assert second["messages"][1]["tool_calls"] == calls("12+35")["tool_calls"]
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "call-1", "content": "47"}


def test_the_program_answers_nonsense_readably_and_asks_no_more_than_three_times():
    answers = [calls("12+", "a"), calls("1+1", "b"), calls("2+2", "c")]
    with served(*answers, says("never asked for")) as (endpoint, asked):
        assert ToolSumAgent().play(EXAMPLE, endpoint) == "\n"
    assert len(asked) == 3
    told = [message["content"] for message in asked[2][1]["messages"] if message["role"] == "tool"]
    assert told == ["=", "2"]


def test_a_proxy_is_not_asked_for_a_policy_on_this_host(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    with served(says("47")) as (endpoint, _):
        shell = ["sh", "-c", "echo $no_proxy $NO_PROXY"]
        assert run_command(shell, endpoint=endpoint) == "example.org,127.0.0.1 example.org,127.0.0.1\n"
        assert ToolSumAgent().play(EXAMPLE, endpoint) == "47\n"


def test_the_program_declares_the_tool_that_the_task_demonstrates():
    (tool,) = ToolSum().tools()
    with served(says("1")) as (endpoint, asked):
        ToolSumAgent().play(EXAMPLE, endpoint)
    assert asked[0][1]["tools"][0]["function"]["parameters"] == tool.spec.parameters
