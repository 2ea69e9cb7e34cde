"""The same with smolagents: `python tool_sum_smolagents.py '12+35='` prints the model's answer.

Its agent's own instructions have 10 KB, too much for a tiny policy, and it forces a call in every turn, in which a tiny
policy would have to spell the names of tools. So the templates are empty, and a call is free.
"""

import os
import re
import sys

from smolagents import EMPTY_PROMPT_TEMPLATES, LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def calculate(expression: str) -> str:
    """The sum of two numbers.

    Args:
        expression: Two numbers, such as 12+35.
    """
    numbers = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", expression)
    return str(int(numbers[1]) + int(numbers[2])) if numbers else "="


if __name__ == "__main__":
    model = OpenAIModel(os.environ["OPENAI_MODEL"], tool_choice="auto")
    agent = ToolCallingAgent([calculate], model, EMPTY_PROMPT_TEMPLATES, max_steps=2, verbosity_level=LogLevel.OFF)
    print(agent.run(sys.argv[1]))
