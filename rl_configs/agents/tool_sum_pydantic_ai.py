"""The same with Pydantic AI: `python tool_sum_pydantic_ai.py '12+35='` prints the model's answer."""

import os
import re
import sys

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel


def calculate(expression: str) -> str:
    """The sum of two numbers, such as 12+35."""
    numbers = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", expression)
    return str(int(numbers[1]) + int(numbers[2])) if numbers else "="


if __name__ == "__main__":
    agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), tools=[calculate], retries=0)
    try:
        print(agent.run_sync(sys.argv[1], usage_limits=UsageLimits(request_limit=3)).output)
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        print()
