"""The calculator task for smolagents: what it demonstrates is what smolagents' agent asks (1 s)."""

import re
import sys
from pathlib import Path
from types import ModuleType

from titan_rl.chat import make_renderer
from titan_rl.environments.base import Message, ToolCall, Transcript
from titan_rl.importing import import_file
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import FinishReason, ToolSpec

_task = import_file(Path(__file__).resolve().parents[2] / "rl_configs" / "tool_sum.py")
SMOLAGENTS = ModuleType("smolagents")


def declared(name, description, argument, about):
    properties = {argument: {"type": "string", "description": about}}
    return ToolSpec(name, description, {"type": "object", "properties": properties, "required": [argument]})


ABOUT_ANSWER = ("Provides a final answer to the given problem.", "answer", "The final answer to the problem")
TOOLS = (
    declared("calculate", "The sum of two numbers.", "expression", "Two numbers, such as 12+35."),
    declared("final_answer", *ABOUT_ANSWER),
)
"""As smolagents 1.26 declares those of the script."""


def asked(text, call_id, result):
    """What its agent sends for a turn."""
    messages = [Message("system", ""), Message("user", f"New task:\n{text}=")]
    if call_id:
        function = {"name": "calculate", "arguments": {"expression": text}}
        called = [{"id": call_id, "type": "function", "function": function}]
        messages += [Message("assistant", f"Calling tools:\n{called}"), Message("user", f"Observation:\n{result}")]
    return messages


def test_a_demonstration_has_the_prompt_of_the_agent_in_few_tokens(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "smolagents", SMOLAGENTS)
    config, task, seen = _task.tool_sum_smolagents(), _task.ToolSumSmolagents(), set()
    policy, rollout = make_tiny_policy(config.policy.tiny, tmp_path), config.rollout
    renderer = make_renderer(rollout.renderer, policy, rollout.renderer_kwargs)
    for index in range(40):
        shown = task.demonstration(index)
        text = shown.prompt[1].content[len("New task:\n") : -1]
        call_id = "".join(re.findall(r"'id': '([^']+)'", shown.prompt[-2].content))
        prompt = renderer.render(shown.prompt)
        assert prompt == renderer.render(asked(text, call_id, eval(text)), TOOLS)
        assert len(prompt) < 120
        (message,) = shown.messages
        seen.add((bool(call_id), message.tool_calls[0].name))
        assert message.tool_calls[0].arguments["answer"] == str(eval(text)) if call_id else True
    assert seen == {(False, "calculate"), (False, "final_answer"), (True, "final_answer")}


def test_what_the_program_prints_is_graded(monkeypatch):
    monkeypatch.setitem(sys.modules, "smolagents", SMOLAGENTS)
    task = _task.ToolSumSmolagents()
    example = task.asked("12+35")
    answer = Message("assistant", "", (ToolCall("final_answer", {"answer": "47"}, id="call-1"),))

    def scored(messages, printed):
        return task.rubric().score(example, Transcript((*messages, answer), (FinishReason.STOP,), printed)).parts

    assert scored(asked("12+35", "call-0", "47"), "47\n") == {"exact_match": 1.0, "tool_use": 1.0}
    assert scored(asked("12+35", "", ""), "46\n") == {"exact_match": 0.0, "tool_use": 0.0}
