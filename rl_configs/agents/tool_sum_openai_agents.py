"""The same with OpenAI's Agents SDK: `python tool_sum_openai_agents.py '12+35='` prints the model's answer."""

import os
import re
import sys

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def calculate(expression: str) -> str:
    """The sum of two numbers, such as 12+35."""
    numbers = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", expression)
    return str(int(numbers[1]) + int(numbers[2])) if numbers else "="


if __name__ == "__main__":
    agent = Agent(name="adder", model=os.environ["OPENAI_MODEL"], tools=[calculate])
    try:
        print(Runner.run_sync(agent, sys.argv[1], max_turns=3).final_output)
    except (MaxTurnsExceeded, ModelBehaviorError):
        print()
