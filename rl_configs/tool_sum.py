"""Add two numbers with a calculator: `12+35=`, then a tool call, its result, and `47`.

The policy says `<tool>12+35</tool>`, the environment `<result>47</result>`, and the policy `47` and the end of its
answer. For tokenizers of single symbols that have these four markers. The reward is for the sum alone, but adding is
beyond a tiny policy: what it can learn is to use the tool. Most demonstrations answer at once with a random number, so
a policy that learned from them rarely calls.

What counts as the answer is the policy's last message, known by where it came from: a `<result>` that the policy wrote
itself is part of that message and makes it wrong.
"""

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.environments.base import (
    Demonstration,
    Endpoint,
    Example,
    Message,
    Reward,
    Rubric,
    Tool,
    ToolCall,
    ToolError,
    Transcript,
    tool,
)
from titan_rl.environments.copy import TextTask
from titan_rl.environments.programs import run_script
from titan_rl.errors import ConfigError
from titan_rl.importing import import_package
from titan_rl.overrides import variant

SMALLEST, LARGEST = 10, 99

_SUM = re.compile(r"(\d{1,9})\+(\d{1,9})")


@tool
def calculate(expression: str) -> str:
    """The sum of two numbers.

    Args:
        expression: two numbers, such as 12+35
    """
    found = _SUM.fullmatch(expression)
    if found is None:
        raise ToolError(f"{expression!r} is not a sum of two numbers")
    return str(int(found[1]) + int(found[2]))


def exact_match(example: Example, transcript: Transcript) -> float:
    """1 when the last message is the sum and nothing else, ended by the policy itself."""
    return float(transcript.stopped and transcript.messages[-1] == Message("assistant", example.answer))


def tool_use(example: Example, transcript: Transcript) -> float:
    """1 when the policy called the tool at least once and was answered."""
    messages = transcript.messages
    return float(any(message.role == "tool" or message.content.startswith(OBSERVATION) for message in messages))


class ToolSum(TextTask):
    """The task. How many calls are answered is `rollout.max_turns` - 1.

    Args:
        tool_share: share of the demonstrations that use the tool; the others answer with a random number.
        seed: decides the training stream and the demonstrations, not the held-out prompts.
    """

    name = "tool sum"

    def __init__(self, tool_share: float = 0.25, seed: int = 0):
        if not 0 <= tool_share <= 1:
            raise ConfigError(f"environment.kwargs.tool_share is a share and must be in 0..1, got {tool_share}")
        super().__init__(seed)
        self.tool_share = tool_share

    def right(self, text: str) -> str:
        return str(sum(map(int, text.split("+"))))

    def draw(self, stream: random.Random) -> str:
        return f"{stream.randint(SMALLEST, LARGEST)}+{stream.randint(SMALLEST, LARGEST)}"

    def all_texts(self) -> Iterator[str]:
        numbers = range(SMALLEST, LARGEST + 1)
        return (f"{first}+{second}" for first in numbers for second in numbers)

    def rubric(self) -> Rubric:
        return Rubric(exact_match, Reward(tool_use, weight=0.0))

    def tools(self) -> tuple[Tool, ...]:
        return (calculate,)

    def tool_error(self, problem: str) -> str:
        return "="  # the one symbol that no result contains: these tokenizers cannot write a sentence

    def demonstration(self, index: int) -> Demonstration:
        text, stream = self.training_text(index, " demonstration")
        example = self.asked(text)
        messages: tuple[Message, ...] = (
            Message("assistant", "", (ToolCall("calculate", {"expression": text}),)),
            Message("tool", example.answer),
            Message("assistant", example.answer),
        )
        if stream.random() >= self.tool_share:
            messages = (Message("assistant", str(stream.randint(2 * SMALLEST, 2 * LARGEST))),)
        return Demonstration(prompt=example.prompt, messages=messages, answer=example.answer)


AGENTS = {
    "openai": (["openai.resources.chat.completions"], "titan-rl[agents]"),
    "openai_agents": (["agents", "anyio._backends._asyncio", "openai.resources.responses.responses"], "openai-agents"),
    "pydantic_ai": (
        ["pydantic_ai.models.openai", "anyio._backends._asyncio", "genai_prices.data"],
        "pydantic-ai-slim[openai]",
    ),
    "anthropic": (["anthropic"], "anthropic"),
    "smolagents": (["smolagents", "openai.resources.chat.completions"], "smolagents[openai]"),
}
"""Package that an agent is written for → its modules, last those that it imports when it plays; what installs it."""


class ToolSumAgent(ToolSum):
    """The same task, played by a script that knows nothing of it, only its client: it asks the policy, calls the
    calculator itself and decides when it is over.

    Args:
        agent: whose client: of `AGENTS`, the script `agents/tool_sum_AGENT.py`.
    """

    def __init__(self, agent: str = "openai", tool_share: float = 0.25, seed: int = 0):
        super().__init__(tool_share, seed)
        if agent not in AGENTS:
            raise ConfigError(f"environment.kwargs.agent is {agent!r}; it must be one of {', '.join(AGENTS)}")
        (module, *later), install = AGENTS[agent]
        import_package(module, for_what="a program of this environment", install=install)
        with suppress(ImportError):  # another version may have other ones
            list(map(import_module, later))
        self._script = Path(__file__).parent / "agents" / f"tool_sum_{agent}.py"

    def play(self, example: Example, endpoint: Endpoint) -> str:
        return run_script(self._script, example.prompt[0].content, endpoint=endpoint)


SYSTEM = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"name": "calculate", "description": "The sum of two numbers.", "parameters": {"type": "object", "properties": \
{"expression": {"type": "string", "description": "Two numbers, such as 12+35."}}, "required": ["expression"]}}
{"name": "final_answer", "description": "Provides a final answer to the given problem.", "parameters": {"type": \
"object", "properties": {"answer": {"type": "string", "description": "The final answer to the problem"}}, \
"required": ["answer"]}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""What Qwen3's format makes of the two tools that smolagents declares."""
TASK, OBSERVATION, CALLED = "New task:\n", "Observation:\n", "Calling tools:\n[{'id': 'call-chatcmpl-"
CALCULATED = "', 'type': 'function', 'function': {'name': 'calculate', 'arguments': {'expression': '"
PHRASES = (
    *(f"system\n{SYSTEM}", f"user\n{TASK}", f"user\n{OBSERVATION}", "assistant\n", "\n\n", f"\n\n{CALLED}", CALCULATED),
    *("'}}}]", '"}}\n'),
    '\n{"name": "calculate", "arguments": {"expression": "',
    '\n{"name": "final_answer", "arguments": {"answer": "',
)
"""Single tokens of the policy's: in bytes, prompts have 1,000 tokens and turns 60."""


def printed(example: Example, transcript: Transcript) -> dict[str, float]:
    """1 when the program printed the sum and nothing else."""
    return {"exact_match": float(transcript.state == f"{example.answer}\n")}


class ToolSumSmolagents(ToolSumAgent):
    """The same task with smolagents, which has a tool for the answer too, and says in words what was called: every turn
    has a prompt of its own, which no earlier one begins."""

    def __init__(self, tool_share: float = 0.25, seed: int = 0):
        super().__init__("smolagents", tool_share, seed)

    def rubric(self) -> Rubric:
        return Rubric(Reward(printed, key="exact_match"), Reward(tool_use, weight=0.0))

    def tools(self) -> tuple[Tool, ...]:
        return ()  # `SYSTEM` says them

    def demonstration(self, index: int) -> Demonstration:
        """Of a turn."""
        text, stream = self.training_text(index, " demonstration")
        prompt, call = (Message("system", SYSTEM), Message("user", f"{TASK}{text}=")), ("expression", text)
        if stream.random() < 1 / 3:
            said = f"{CALLED}{stream.randbytes(16).hex()}-0-0{CALCULATED}{text}'}}}}}}]"
            prompt += (Message("assistant", said), Message("user", f"{OBSERVATION}{self.right(text)}"))
            call = ("answer", self.right(text))
        elif stream.random() >= self.tool_share:
            call = ("answer", str(stream.randint(2 * SMALLEST, 2 * LARGEST)))
        name = "calculate" if call[0] == "expression" else "final_answer"
        message = Message("assistant", "", (ToolCall(name, dict([call])),))
        return Demonstration(prompt=prompt, messages=(message,), answer=self.right(text))


def tool_sum() -> RunConfig:
    """Several turns with a tool: a tiny policy that mostly guessed sums learns to ask for them."""
    return variant(
        copy4(),
        {
            "policy.tiny.symbols": "0123456789+=",
            "policy.tiny.special_tokens": ("<tool>", "</tool>", "<result>", "</result>"),
            "environment.name": f"{__file__}:ToolSum",
            "environment.kwargs": {"tool_share": 0.25},
            "rollout.max_turns": 3,  # two calls and an answer
            "rollout.max_sampled_tokens": 15,
            "rollout.sampling.max_new_tokens": 15,
            "trainer.warmup.steps": 200,
            "trainer.optimizer.lr": 5e-4,
            "trainer.loss.kwargs": {"clip_low": 0.2, "clip_high": 0.2},
            "loop.steps": 120,
            "loop.groups_per_step": 16,
            "evaluation.target_exact_match": 0.9,
        },
    )


def tool_sum_openai() -> RunConfig:
    """tool_sum played by a script that only knows OpenAI's client, through the gateway."""
    return _played_by("openai")


def tool_sum_openai_agents() -> RunConfig:
    """The same script for OpenAI's Agents SDK, which speaks the Responses API."""
    return _played_by("openai_agents")


def tool_sum_pydantic_ai() -> RunConfig:
    """The same script for Pydantic AI."""
    return _played_by("pydantic_ai")


def tool_sum_anthropic() -> RunConfig:
    """The same script for Anthropic's client, which speaks its Messages API."""
    return _played_by("anthropic")


def tool_sum_smolagents() -> RunConfig:
    """The same script for smolagents, whose two tools need Qwen3's chat format."""
    return variant(
        _played_by("smolagents"),
        {
            "environment.name": f"{__file__}:ToolSumSmolagents",
            "environment.kwargs": {"tool_share": 0.25},
            "policy.tiny.tokenizer": "chat",
            "policy.tiny.special_tokens": PHRASES,
            "policy.tiny.max_length": 1024,
            "generator.max_model_len": 1024,
            "rollout.renderer_kwargs": {"enable_thinking": False},
            "rollout.sampling.max_new_tokens": 12,
            "trainer.warmup.steps": 400,
            "trainer.warmup.batch": 64,
        },
    )


def _played_by(agent: str) -> RunConfig:
    return variant(
        tool_sum(),
        {
            "environment.name": f"{__file__}:ToolSumAgent",
            "environment.kwargs": {"agent": agent, "tool_share": 0.25},
            # a turn has room for a call; together they need no bound, past which the program's next call would fail
            "rollout.sampling.max_new_tokens": 9,
            "rollout.max_sampled_tokens": 0,
            "rollout.agents.at_once": 8,  # they compute as much as they wait
            # what takes the time is 128 programs a step, not their tokens
            "generator.count": 1,
            "loop.steps": 30,
            "evaluation.every": 15,
            "evaluation.prompts": 200,
        },
    )
