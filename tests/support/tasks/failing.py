"""A task in which the policy says what fails; named by tests as `failing.py:Failing`.

A rollout first calls the tool, then answers. Where it does not say one of the words below, it succeeds.
"""

import asyncio
import os

from titan_rl.environments.base import Environment, EnvironmentReply, Example, GroupReward, Message, Rubric, tool

TOOL, INFRASTRUCTURE, TASK, GRADER, TIMEOUT = "+1", "+2", "+3", "+4", "+5"


@tool
def look(page: str) -> str:
    """Opens a page."""
    if page == TOOL:
        raise KeyError("no page")
    if page == INFRASTRUCTURE:
        os._exit(7)
    return "0"


async def length(example, transcript):
    if transcript.answer == GRADER:
        raise ValueError("no reward")
    if transcript.answer == TIMEOUT:
        await asyncio.Event().wait()
    return float(len(transcript.answer))


def place(example, transcripts):
    """Where each answer stands in its group, the shortest first."""
    lengths = sorted(len(transcript.answer) for transcript in transcripts)
    return [lengths.index(len(transcript.answer)) for transcript in transcripts]


class Failing(Environment):
    def example(self, index):
        return Example(prompt=(Message("user", f"{index}="),))

    def held_out(self, count):
        return []

    def rubric(self):
        return Rubric(length, GroupReward(place, weight=0.25))

    def tools(self):
        return (look,)

    def respond(self, example, transcript):
        if transcript.answer == TASK:
            raise RuntimeError("no reply")
        return EnvironmentReply(done=True)
