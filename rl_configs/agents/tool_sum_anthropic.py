"""The same with Anthropic's client: `python tool_sum_anthropic.py '12+35='` prints the model's answer.

The model comes from ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ANTHROPIC_MODEL.
"""

import os
import re
import sys

from anthropic import Anthropic

MOST_ANSWERS, LONGEST = 3, 9
EXPRESSION = {"type": "string", "description": "two numbers, such as 12+35"}
CALCULATOR = {
    "name": "calculate",
    "description": "The sum of two numbers.",
    "input_schema": {"type": "object", "properties": {"expression": EXPRESSION}, "required": ["expression"]},
}


def calculate(expression):
    numbers = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", expression)
    return str(int(numbers[1]) + int(numbers[2])) if numbers else "="


def main(question):
    client = Anthropic()
    messages = [{"role": "user", "content": question}]
    for _ in range(MOST_ANSWERS):
        answer = client.messages.create(
            model=os.environ["ANTHROPIC_MODEL"], max_tokens=LONGEST, messages=messages, tools=[CALCULATOR]
        )
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": calculate(**call.input)} for call in calls
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    print("".join(block.text for block in answer.content if block.type == "text"))


if __name__ == "__main__":
    main(sys.argv[1])
