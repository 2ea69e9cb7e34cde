"""Text to tokens and back, with tokenizers made on the spot (10 s, most of it the import of transformers)."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from titan_rl.chat import make_renderer
from titan_rl.chat.chat_renderer import ChatRenderer
from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.errors import ConfigError, TaskError
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import FinishReason, Message, ToolCall, ToolSpec

ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"terms": {"type": "string"}}})


@pytest.fixture(scope="module")
def symbols_path(tmp_path_factory):
    config = TinyPolicyConfig(symbols="0123456789+=", special_tokens=("<tool>", "</tool>", "<result>", "</result>"))
    return make_tiny_policy(config, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory):
    """Qwen3's format over bytes."""
    return make_tiny_policy(TinyPolicyConfig(tokenizer="chat"), tmp_path_factory.mktemp("chat"))


def plain(path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def test_symbols_are_rendered_as_the_tokenizer_itself_does(symbols_path):
    renderer = SymbolRenderer(symbols_path)
    for text in ("12+35=", "<tool>12+35</tool>", "<result>47</result>", "<pad>1<eos>"):
        assert renderer.render([Message("user", text)]) == plain(symbols_path).encode(text).ids
    assert renderer.vocab_size == 2 + 12 + 4
    assert renderer.stop_token_ids == (1, plain(symbols_path).token_to_id("</tool>"))


def test_a_conversation_that_is_sent_whole_has_the_tokens_that_were_sampled(symbols_path):
    renderer = SymbolRenderer(symbols_path)
    prompt, answer, more = Message("user", "1+2="), Message("assistant", "3"), Message("user", "5=")
    sampled = renderer.say(answer)
    before = renderer.render([prompt])
    assert renderer.render([prompt, answer, more]) == before + sampled + renderer.extend(before, sampled, [more])


def test_what_was_sampled_comes_back_as_text_without_its_stop_token(symbols_path):
    renderer = SymbolRenderer(symbols_path)
    sampled = [*renderer.render([Message("user", "<tool>1+2</tool>")]), 0]
    assert renderer.parse([*sampled, 1], FinishReason.STOP) == Message("assistant", "<tool>1+2</tool><pad>")
    assert renderer.parse(sampled, FinishReason.LENGTH) == Message("assistant", "<tool>1+2</tool><pad>")
    assert renderer.parse([], FinishReason.LENGTH).content == ""
    assert renderer.parse([9999], FinishReason.LENGTH).content == "<unknown>"


def test_a_foreign_character_is_named(symbols_path):
    with pytest.raises(TaskError, match="'x'"):
        SymbolRenderer(symbols_path).render([Message("user", "12x")])


def test_a_reply_that_cannot_be_written_is_read_as_unknown_and_a_question_is_refused(tmp_path):
    tokens = ("<tool>", "</tool>", "<result>", "</result>", "<unknown>")
    renderer = SymbolRenderer(make_tiny_policy(TinyPolicyConfig(symbols="01=", special_tokens=tokens), tmp_path))
    prompt, turn = Message("user", "1="), Message("assistant", "", (ToolCall("add", {"terms": "1"}),))
    before, sampled = renderer.render([prompt]), renderer.say(turn)
    for reply, read in (("1", "1"), ("Error: 1", "<unknown>")):
        tool, user = Message("tool", reply), Message("user", reply)
        tokens = renderer.extend(before, sampled, [tool, user])
        assert renderer.decode(tokens) == f"<result>{read}</result>{read}"
        assert renderer.render([prompt, turn, tool, user]) == before + sampled + tokens
    with pytest.raises(TaskError, match="'E'"):
        renderer.render([Message("user", "Error: 1"), turn])


def test_auto_is_by_the_chat_template(symbols_path, chat_path):
    assert isinstance(make_renderer("auto", symbols_path), SymbolRenderer)
    assert isinstance(make_renderer("auto", chat_path), ChatRenderer)


def test_a_chat_prompt_is_what_the_template_gives(chat_path):
    renderer = make_renderer("chat", chat_path)
    ids = renderer.render([Message("system", "be brief"), Message("user", "sort")])
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nsort<|im_end|>\n<|im_start|>assistant\n"
    assert ids == plain(chat_path).encode(text, add_special_tokens=False).ids
    im_end = plain(chat_path).token_to_id("<|im_end|>")
    assert im_end in renderer.stop_token_ids


def test_a_chat_answer_loses_its_thinking_and_its_stop_token(chat_path):
    renderer = make_renderer("chat", chat_path)
    prompt = renderer.render([Message("user", "sort")])
    answer = plain(chat_path).encode("<think>\nhm\n</think>\n\nAda<|im_end|>", add_special_tokens=False).ids
    assert renderer.parse(answer, FinishReason.STOP, prompt) == Message("assistant", "Ada", reasoning="hm")


@pytest.mark.parametrize("thinking", [True, False])
def test_a_later_chat_turn_leaves_the_sampled_tokens_alone(chat_path, thinking):
    renderer = make_renderer("chat", chat_path, {"enable_thinking": thinking})
    encode = plain(chat_path).encode
    prompt = renderer.render([Message("user", "sort")])
    sampled = encode("Ada \n<|im_end|>", add_special_tokens=False).ids
    added = renderer.extend(prompt, sampled, [Message("user", "again")])
    text = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n" + "<think>\n\n</think>\n\n" * (not thinking)
    assert added == encode(text, add_special_tokens=False).ids


def test_a_truncated_chat_turn_is_closed_by_a_token_nobody_sampled(chat_path):
    renderer = make_renderer("chat", chat_path, {"enable_thinking": False})
    prompt = renderer.render([Message("user", "sort")])
    sampled = plain(chat_path).encode("Ada", add_special_tokens=False).ids
    added = renderer.extend(prompt, sampled, [Message("user", "again")])
    assert added[0] == plain(chat_path).token_to_id("<|im_end|>")


def test_an_unknown_model_uses_its_own_chat_template(chat_path):
    renderer = make_renderer("default", chat_path)
    assert renderer.render([Message("user", "sort")]) == make_renderer("chat", chat_path).render(
        [Message("user", "sort")]
    )
    with pytest.raises(TaskError, match="cannot be extended"):
        renderer.extend([1], [2], [Message("user", "again")])


def test_unknown_renderers_settings_and_directories_are_refused(chat_path, symbols_path, tmp_path):
    for name, path, settings in (
        ("nonsense", chat_path, None),
        ("chat", chat_path, {"no_such_setting": 1}),
        ("symbols", tmp_path, None),
        ("auto", symbols_path, {"enable_thinking": False}),
    ):
        with pytest.raises(ConfigError):
            make_renderer(name, path, settings)


def test_a_missing_library_is_one_sentence(chat_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match="pip install"):
        make_renderer("chat", chat_path)


def test_rendering_needs_neither_torch_nor_transformers(symbols_path, chat_path):
    code = (
        "import sys; from titan_rl.chat import make_renderer; "
        "[make_renderer('auto', path) for path in sys.argv[1:]]; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(symbols_path), str(chat_path)], capture_output=True, text=True, timeout=60
    )
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


@pytest.mark.parametrize("name", ["symbols", "chat"])
def test_what_the_policy_is_to_say_is_parsed_back(name, symbols_path, chat_path):
    renderer = SymbolRenderer(symbols_path) if name == "symbols" else ChatRenderer(chat_path)
    message = Message("assistant", "12+35" if name == "symbols" else "Sorted: Ada, Bob.")
    said = renderer.say(message)
    assert said[-1] == renderer.stop_token_ids[0]
    assert renderer.parse(said, FinishReason.STOP) == message


def test_a_call_of_symbols_ends_its_turn_and_is_parsed_back(symbols_path):
    renderer = SymbolRenderer(symbols_path)
    message = Message("assistant", "3", (ToolCall("add", {"terms": "12+35"}),))
    said = renderer.say(message)
    assert said == renderer.render([Message("user", "3<tool>12+35</tool>")]) and said[-1] in renderer.stop_token_ids
    assert renderer.parse(said, FinishReason.STOP, (), [ADD]) == message
    assert renderer.parse(said, FinishReason.STOP) == Message("assistant", "3<tool>12+35</tool>")  # nothing to call
    (call,) = renderer.parse(said[4:], FinishReason.STOP, (), [ADD]).tool_calls
    assert "no <tool> before" in call.problem
    with pytest.raises(TaskError, match="one tool with one argument"):
        renderer.render([Message("user", "1")], [ADD, ADD])


def test_a_chat_prompt_declares_the_tools_and_results_go_on_from_the_call(chat_path):
    renderer = make_renderer("chat", chat_path)
    prompt = renderer.render([Message("user", "add")], [ADD])
    assert json.dumps(ADD._asdict()) in plain(chat_path).decode(prompt, skip_special_tokens=False)
    text = 'hm<tool_call>\n{"name": "add", "arguments": {"terms": "1+2"}}\n</tool_call><|im_end|>'
    sampled = plain(chat_path).encode(text, add_special_tokens=False).ids
    parsed = renderer.parse(sampled, FinishReason.STOP, prompt, [ADD])
    assert parsed == Message("assistant", "hm", (ToolCall("add", {"terms": "1+2"}),))
    added = renderer.extend(prompt, sampled, [Message("tool", "3")], [ADD])
    assert "<tool_response>\n3\n</tool_response>" in plain(chat_path).decode(added, skip_special_tokens=False)


def test_a_call_is_demonstrated_to_a_chat_format_as_the_policy_would_say_it(chat_path):
    renderer = make_renderer("chat", chat_path)
    message = Message("assistant", "hm", (ToolCall("add", {"terms": "1+2"}),))
    said = renderer.say(message)
    assert said[-1] in renderer.stop_token_ids
    assert renderer.parse(said, FinishReason.STOP, renderer.render([Message("user", "add")], [ADD]), [ADD]) == message
    with pytest.raises(TaskError, match="cannot be demonstrated|cannot write"):
        make_renderer("default", chat_path).say(message)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        ('{"name": "add", "arguments"', "invalid json"),
        ('{"arguments": {}}', "missing name"),
        ('{"name": "add", "arguments": [1]}', "must be a JSON object"),
    ],
)
def test_a_malformed_chat_call_is_a_call_with_a_problem(chat_path, call, word):
    renderer = make_renderer("chat", chat_path)
    sampled = plain(chat_path).encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False).ids
    (parsed,) = renderer.parse(sampled, FinishReason.STOP, (), [ADD]).tool_calls
    assert word in parsed.problem and call in parsed.problem
    assert call in parsed.raw
    without_tools = renderer.parse(sampled, FinishReason.STOP)
    assert not without_tools.tool_calls and call in without_tools.content, "what nobody could call is text"


# Clients' conversations, with calls and their results.


def call(**arguments):
    return Message("assistant", "", (ToolCall("add", arguments, id="1"),))


def test_symbols_write_a_call_and_its_result_as_the_policy_says_them(symbols_path):
    renderer = SymbolRenderer(symbols_path)
    history = [Message("user", "12+35="), call(terms="12+35"), Message("tool", "47", tool_call_id="1")]
    written = renderer.render(history, [ADD])
    assert renderer.decode(written) == "12+35=<tool>12+35</tool><result>47</result>"
    assert written == renderer.encode("12+35=<tool>12+35</tool><result>47</result>")
    unfinished = Message("assistant", "<tool>12")
    assert renderer.parse(renderer.encode("<tool>12"), FinishReason.LENGTH, [], [ADD]) == unfinished


@pytest.mark.parametrize(
    "tools",
    [
        [ToolSpec("add", "", {})],
        [ToolSpec("add", "", {"properties": 3})],
        [ToolSpec("add", "", {"properties": {"a": {}, "b": {}}})],
    ],
)
def test_symbols_refuse_tools_that_they_cannot_write(symbols_path, tools):
    with pytest.raises(TaskError, match="one tool with one argument"):
        SymbolRenderer(symbols_path).render([Message("user", "1")], tools)
    with pytest.raises(TaskError, match="with one argument"):
        SymbolRenderer(symbols_path).render([call(a="1", b="2")], [ADD])


def test_a_tokenizer_without_tool_symbols_refuses_tools(tmp_path):
    plain = SymbolRenderer(make_tiny_policy(TinyPolicyConfig(symbols="01"), tmp_path))
    with pytest.raises(TaskError, match="no symbols <tool>"):
        plain.render([Message("user", "1")], [ADD])


def test_a_chat_shows_its_tools_and_the_calls_and_results_so_far(chat_path):
    chat = make_renderer("chat", chat_path)
    history = [Message("user", "12+35?"), call(terms="12+35"), Message("tool", "47", tool_call_id="1")]
    text = chat.decode(chat.render(history, [ADD]))
    assert '<tool_call>\n{"name": "add", "arguments": {"terms": "12+35"}}\n</tool_call>' in text
    assert text.endswith("<tool_response>\n47\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    said = chat.parse(
        chat.encode('<tool_call>\n{"name": "add", "argu\n</tool_call><|im_end|>'), FinishReason.STOP, [], [ADD]
    )
    assert said.tool_calls[0].problem
    assert '{"name": "add", "argu' in chat.decode(chat.render([Message("user", "?"), said], [ADD]))


def test_text_that_no_tokenizer_can_write_is_refused(chat_path):
    chat = make_renderer("chat", chat_path)
    with pytest.raises(TaskError, match="not valid Unicode"):
        chat.encode("a\ud800")
    with pytest.raises(TaskError, match="cannot write"):
        chat.render([Message("user", "\ud800")])
    with pytest.raises(TaskError, match="cannot write"):
        chat.extend([1], [2], [Message("user", "\ud800")])


def test_a_symbol_may_say_where_a_turn_of_the_policy_begins(tmp_path):
    tokens = ("<tool>", "</tool>", "<turn>")
    renderer = SymbolRenderer(make_tiny_policy(TinyPolicyConfig(symbols="01=", special_tokens=tokens), tmp_path))
    (mark,) = renderer.encode("<turn>")
    prompt = renderer.render([Message("user", "01")])
    assert prompt == [*renderer.encode("01"), mark]
    said = renderer.say(Message("assistant", "1"))
    later = [Message("user", "0")]
    whole = [*prompt, *said, *renderer.extend(prompt, said, later)]
    assert whole[-2:] == [*renderer.encode("0"), mark] and mark not in said
    assert renderer.render([Message("user", "01"), Message("assistant", "1"), *later]) == whole
