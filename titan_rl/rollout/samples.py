"""From the rollouts of a group to what the trainer gets: advantages, and one packed sample per branch.

If a rollout has several samples:

- Advantages are computed over rollouts. Every branch carries the advantage of its rollout, so a rollout with many
  branches counts once in its group's mean.
- The loss is divided by the number of trained tokens, and each token is trained in one branch only. So branches do not
  add weight to shared tokens.
- `(group_id, sample)` names one branch. In a group of n rollouts, the first branch of rollout r has the number r, and
  the b-th branch after it r + b * n. So `sample % n` is the rollout.

In a demonstration the policy's turns are trained, with their stop tokens. No policy sampled them, so they have no
logprobs and no versions. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.rollout.report import Rollout
from titan_rl.rollout.token_graph import TokenGraph, branches_of
from titan_rl.types import NO_VERSION, Completion, FinishReason, Message, ToolSpec, TrainingSample


def group_advantages(rewards: Sequence[float], epsilon: float = 1e-4) -> np.ndarray:
    """Outcome advantages of GRPO: how much better a rollout did than its siblings, in deviations.

    `A_i = (r_i - mean(r)) / (std(r) + epsilon)`, DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the unbiased
    deviation (n - 1). A group of equal rewards, or of one rollout, gets zeros.

    Args:
        rewards: [n] up to `rubric.LARGEST_REWARD`, so that their squares are finite.
        epsilon: keeps groups of nearly equal rewards from exploding.

    Returns:
        [n] float64.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        # a special case, because the formula would divide the rounding error of the mean by epsilon
        return np.zeros(len(values))
    spread = values.std(ddof=1) + epsilon
    if not spread:  # epsilon is 0 and the squared differences underflow
        return np.zeros(len(values))
    return (values - values.mean()) / spread


def training_samples(
    group_id: int, graded: Sequence[Rollout], advantages: Sequence[float], *, rollouts: int
) -> tuple[TrainingSample, ...]:
    """The samples of the branches of these rollouts of a group; those that sampled nothing have none.

    Args:
        advantages: one per rollout.
        rollouts: number of rollouts in the group, including failed ones.
    """
    branches = branches_of(rollout.graph for rollout in graded)
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
        for rollout, advantage, its in zip(graded, advantages, branches, strict=True)
        for number, branch in enumerate(its)
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
        messages: the messages after the prompt, beginning with a turn of the policy (role "assistant").
        tools: tools that the policy may call.

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
    (taught,) = training_samples(group_id, [Rollout(sample=sample, graph=graph)], [0.0], rollouts=1)
    return taught


def _shown(token_ids: list[int]) -> Completion:
    """A demonstrated turn as a completion."""
    return Completion(
        request_id="demonstration",
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        versions=np.full(len(token_ids), NO_VERSION, dtype=np.int64),
        finish_reason=FinishReason.STOP,
    )
