"""Token graphs as packed documents for the trainer: one sample per branch.

Several samples of one rollout mean:

- Advantages are taken over rollouts; every branch carries that of its rollout, so a rollout with many branches counts
  once in its group's mean.
- The loss is divided by the number of trained tokens, and a token is trained in one branch only: branches add no
  weight to what they share.
- `(group_id, sample)` names one branch. The first branch of a rollout has the rollout's own number r, the b-th after it
  r + b * n in a group of n rollouts; so `sample % n` is the rollout.

Of a demonstration the policy's turns are trained, the stop tokens that end them included; no policy sampled them, so
they have no logprobs and no versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.rollout.result import Rollout
from titan_rl.rollout.token_graph import TokenGraph
from titan_rl.types import NO_VERSION, Completion, FinishReason, Message, ToolSpec, TrainingSample


def training_samples(group_id: int, rollout: Rollout, *, advantage: float, rollouts: int) -> tuple[TrainingSample, ...]:
    """The branches of a rollout; none where nothing was sampled.

    Args:
        rollouts: how many its group has, those that failed included.
    """
    return tuple(
        TrainingSample(
            group_id=group_id,
            sample=rollout.sample + number * rollouts,
            token_ids=branch.token_ids,
            loss_mask=branch.loss_mask,
            logprobs=branch.logprobs,
            versions=branch.versions,
            advantage=advantage,
            reward=rollout.reward,
        )
        for number, branch in enumerate(rollout.graph.branches())
    )


def demonstration_sample(
    group_id: int,
    sample: int,
    renderer: Renderer,
    prompt: Sequence[Message],
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
) -> TrainingSample:
    """The packed document of a demonstration, up to the policy's last turn.

    Args:
        prompt: the first messages.
        messages: what follows, the policy's turn (role "assistant") first.
        tools: what the policy may call.

    Raises:
        TaskError: the messages cannot be written in this tokenizer.
    """
    graph = TokenGraph()
    before: list[int] = renderer.render(prompt, tools)
    said: list[int] = []
    for by_policy, turn in groupby(messages, key=lambda message: message.role == "assistant"):
        if by_policy:
            said = [token_id for message in turn for token_id in renderer.say(message)]
            graph.add(before, _shown(said))
        else:
            before = [*before, *said, *renderer.extend(before, said, list(turn), tools)]
    (taught,) = training_samples(group_id, Rollout(sample=sample, graph=graph), advantage=0.0, rollouts=1)
    return taught


def _shown(token_ids: list[int]) -> Completion:
    """What a policy would have sampled."""
    return Completion(
        request_id="demonstration",
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        versions=np.full(len(token_ids), NO_VERSION, dtype=np.int64),
        finish_reason=FinishReason.STOP,
    )
