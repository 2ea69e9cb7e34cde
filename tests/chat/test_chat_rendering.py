"""Clients' conversations to tokens and back, with tokenizers made on the spot (1 s)."""

import pytest
from support.rollouts import calling_policy

from titan_rl.chat.chat_renderer import ChatRenderer
from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.errors import TaskError
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import FinishReason, Message, ToolCall, ToolSpec

CALCULATOR = ToolSpec("add", "adds", {"type": "object", "properties": {"terms": {"type": "string"}}})


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return SymbolRenderer(calling_policy(tmp_path_factory.mktemp("tiny")))


def call(**arguments):
    return Message("assistant", "", (ToolCall("add", arguments, id="1"),))


def test_symbols_write_a_call_and_its_result_as_the_policy_says_them(renderer):
    history = [Message("user", "12+35="), call(terms="12+35"), Message("tool", "47", tool_call_id="1")]
    written = renderer.render(history, [CALCULATOR])
    assert renderer.decode(written) == "12+35=<tool>12+35</tool><result>47</result>"
    assert written == renderer.encode("12+35=<tool>12+35</tool><result>47</result>")


def test_what_a_policy_says_between_tool_symbols_is_a_call(renderer):
    said = renderer.encode("1<tool>12+35</tool>")
    assert renderer.parse(said, FinishReason.STOP, [], [CALCULATOR]) == Message(
        "assistant", "1", (ToolCall("add", {"terms": "12+35"}),)
    )


def test_a_call_that_is_not_finished_stays_text(renderer):
    assert renderer.parse(renderer.encode("<tool>12"), FinishReason.LENGTH, [], [CALCULATOR]) == Message(
        "assistant", "<tool>12"
    )


def test_without_tools_nothing_is_a_call(renderer):
    assert renderer.parse(renderer.encode("<tool>12</tool>"), FinishReason.STOP, [], []).tool_calls == ()


@pytest.mark.parametrize(
    "tools",
    [
        [CALCULATOR, CALCULATOR],
        [ToolSpec("add", "", {})],
        [ToolSpec("add", "", {"properties": 3})],
        [ToolSpec("add", "", {"properties": {"a": {}, "b": {}}})],
    ],
)
def test_symbols_refuse_tools_that_they_cannot_write(renderer, tools):
    with pytest.raises(TaskError, match="one tool with one argument"):
        renderer.render([Message("user", "1")], tools)


def test_symbols_refuse_a_call_of_several_arguments(renderer):
    with pytest.raises(TaskError, match="with one argument"):
        renderer.render([call(a="1", b="2")], [CALCULATOR])


def test_a_tokenizer_without_tool_symbols_refuses_tools(tmp_path):
    plain = SymbolRenderer(make_tiny_policy(TinyPolicyConfig(symbols="01"), tmp_path))
    with pytest.raises(TaskError, match="no symbols <tool>"):
        plain.render([Message("user", "1")], [CALCULATOR])


# A chat format of the `renderers` library: Qwen3's, over bytes.


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatRenderer(make_tiny_policy(TinyPolicyConfig(tokenizer="chat"), tmp_path_factory.mktemp("chat")))


def parse(chat, text, tools):
    prompt = chat.render([Message("user", "?")], tools)
    return chat.parse(chat.encode(f"{text}<|im_end|>"), FinishReason.STOP, prompt, tools)


def test_a_chat_shows_its_tools_and_the_calls_and_results_so_far(chat):
    history = [Message("user", "12+35?"), call(terms="12+35"), Message("tool", "47", tool_call_id="1")]
    text = chat.decode(chat.render(history, [CALCULATOR]))
    assert '"name": "add"' in text.partition("<|im_end|>")[0]
    assert '<tool_call>\n{"name": "add", "arguments": {"terms": "12+35"}}\n</tool_call>' in text
    assert "<tool_response>\n47\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_a_chats_call_and_its_thinking_are_taken_apart(chat):
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"terms": "1+2"}}\n</tool_call>'
    said = parse(chat, text, [CALCULATOR])
    assert said == Message("assistant", "", (ToolCall("add", {"terms": "1+2"}),), reasoning="hm")


def test_a_call_that_could_not_be_read_is_written_again_as_the_policy_said_it(chat):
    said = parse(chat, '<tool_call>\n{"name": "add", "argu\n</tool_call>', [CALCULATOR])
    (malformed,) = said.tool_calls
    assert malformed.problem
    assert '{"name": "add", "argu' in chat.decode(chat.render([Message("user", "?"), said], [CALCULATOR]))


def test_text_that_no_tokenizer_can_write_is_refused(chat):
    with pytest.raises(TaskError, match="not valid Unicode"):
        chat.encode("a\ud800")
    with pytest.raises(TaskError, match="cannot write"):
        chat.render([Message("user", "\ud800")])
    with pytest.raises(TaskError, match="cannot write"):
        chat.extend([1], [2], [Message("user", "\ud800")])
