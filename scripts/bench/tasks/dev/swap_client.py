"""Asks for a draft, tidies the draft up in the conversation as if the model had said just that, and asks once more."""

import os
import sys

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set
MODEL = os.environ["OPENAI_MODEL"]


def complete(messages):
    return client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content or ""


word = sys.argv[1]
messages = [{"role": "user", "content": word + "="}]
draft = complete(messages)
# only as long as the word, and nothing but its letters: everything else becomes c
clean = "".join(ch if ch in "abc" else "c" for ch in draft)[: len(word)].ljust(len(word), "c")
messages.append({"role": "assistant", "content": clean})
messages.append({"role": "user", "content": "!"})
print(complete(messages), end="")
