"""Tokens that stand for whole messages."""

from titan_rl.chat.renderer import END, MessageRenderer
from titan_rl.types import FinishReason, Message, ToolCall, ToolSpec

ADD = ToolSpec("add", "adds", {})


def test_a_conversation_comes_back_from_its_tokens_with_its_tools():
    renderer = MessageRenderer()
    asked, said = Message("user", "5+1="), Message("assistant", "", (ToolCall("add", {"first": 5}),), reasoning="so")
    prompt = renderer.render([asked], [ADD])
    completion = renderer.say(said)
    assert completion[-1] == END == renderer.stop_token_ids[0]
    assert renderer.parse(completion, FinishReason.STOP, prompt, [ADD]) == said
    answer = Message("tool", "6")
    further = [*prompt, *completion, *renderer.extend(prompt, completion, [answer], [ADD])]
    assert renderer.messages(further) == [asked, said, answer]
    assert renderer.tools(further) == (ADD,)
    assert max(further) < renderer.vocab_size


def test_text_is_a_message_of_its_own():
    renderer = MessageRenderer()
    assert renderer.decode([*renderer.encode("5+1"), *renderer.encode("="), END]) == "5+1="
    assert renderer.parse(renderer.encode("6"), FinishReason.LENGTH) == Message("assistant", "6")
    assert renderer.parse([], FinishReason.LENGTH) == Message("assistant", "")
    assert renderer.tools(renderer.render([])) == ()
