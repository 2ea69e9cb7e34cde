"""A task with tools of every temper; named by tests as `calling.py:Class`."""

import asyncio

from titan_rl.environments.base import Environment, EnvironmentReply, Example, Message, Rubric, State, ToolError, tool


def length_of(expression: str) -> str:
    match expression:
        case "1":
            raise ToolError("a single digit cannot be measured")
        case "2":
            raise ValueError("a bug")
        case "3":
            while True:
                pass
        case "4":
            return [4]  # neither text nor number
    return str(len(expression))


@tool
def measure(expression: str) -> str:
    return length_of(expression)


async def later(expression: str) -> str:
    await asyncio.sleep(0)
    return length_of(expression)


def heard(example, transcript):
    return float(sum(message.role == "tool" for message in transcript.messages))


class Calling(Environment):
    function = measure
    said: tuple[str, ...] = ()

    def example(self, index):
        return Example(prompt=(Message("user", f"{index}="),))

    def held_out(self, count):
        return []

    def rubric(self):
        return Rubric(heard)

    def tools(self):
        return (self.function,)

    def tool_error(self, problem):
        return "=" * (len(problem) > 10)


class CallingLater(Calling):
    later.__name__ = "measure"
    function = tool(later)


class CallingAndAnswering(Calling):
    """Speaks to the policy whenever it calls nothing."""

    def respond(self, example, transcript):
        return EnvironmentReply(messages=(Message("user", "8="),), done=len(transcript.finish_reasons) > 3)


@tool
def note(expression: str, notes: State) -> str:
    notes.append(expression)
    return str(len(notes))


def noted(example, transcript):
    return float(10 * len(transcript.state) + sum(map(int, transcript.state)))


class Noting(Calling):
    """Remembers what this rollout has noted; says something itself after a turn that notes nothing."""

    function = note

    kept = []

    def initial_state(self, example):
        return self.kept

    def respond(self, example, transcript):
        return EnvironmentReply(messages=(Message("user", "8="),), done=len(transcript.finish_reasons) > 3)

    def rubric(self):
        return Rubric(noted)
