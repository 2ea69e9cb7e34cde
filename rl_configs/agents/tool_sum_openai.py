"""Ask a language model for a sum, with a calculator at hand: `python tool_sum_openai.py '12+35='` prints its answer.

The model comes from OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL.
"""

import json
import os
import re
import sys

from openai import OpenAI

MOST_ANSWERS = 3
"""Two calls of the calculator, and an answer."""

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "two numbers, such as 12+35"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}


def calculate(expression):
    numbers = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", expression)
    return str(int(numbers[1]) + int(numbers[2])) if numbers else "="


def main(question):
    client = OpenAI()
    messages = [{"role": "user", "content": question}]
    for _ in range(MOST_ANSWERS):
        completion = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, tools=[CALCULATOR]
        )
        answer = completion.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result = calculate(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(answer.content or "")


if __name__ == "__main__":
    main(sys.argv[1])
