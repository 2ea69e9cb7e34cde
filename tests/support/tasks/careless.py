"""A program that does not mind whether it is answered."""

import openai

from titan_rl.environments.base import Environment, Example, Message, Rubric


def same(example, transcript):
    return 1.0


class Careless(Environment):
    def example(self, index):
        return Example(prompt=(Message("user", f"{index}="),))

    def held_out(self, count):
        return []

    def rubric(self):
        return Rubric(same)

    def play(self, example, endpoint):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        asked = [{"role": message.role, "content": message.content} for message in example.prompt]
        try:
            client.chat.completions.create(model=endpoint.model, messages=asked)
        except openai.OpenAIError:
            return "not answered"
