"""Finds the greatest of three digits with two questions. Keeps its context short: the first question and its answer
are replaced by what was learned from them."""

import json
import os
import sys
import urllib.request


def ask(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


first, second, third = sys.argv[1]
history = [{"role": "user", "content": f"{first}{second}?"}]
greater = ask(history)

# forget how we came to know it
kept = greater[:1] if greater[:1].isdigit() else first
history = [{"role": "user", "content": f"{kept}{third}?"}]
greatest = ask(history)

print(json.dumps({"first": greater, "last": greatest}))
