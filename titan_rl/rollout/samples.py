"""From the tokens of rollouts to training samples: a tree per rollout, in which every token is stored once and trained
once; demonstrations.

    [1 2 3], sampled [4 5]                 123 ── 45*                        * sampled
    [1 2 3 4 5 6], sampled [7]             123 ── 45* ── 6 ── 7*             goes on: still one branch
    [1 2 9], sampled [4]                   12 ─┬─ 3 ── 45* ── 6 ── 7*        an edited history: two branches
                                               └─ 9 ── 4*

- A turn is the exact prompt tokens that an engine got and the tokens that it sampled. The prompt shares the longest
  path that it begins with; only the rest is added. So a prompt that extends a leaf keeps its branch, and any other one
  starts a new branch.
- A node is either given or sampled. That depends on where its tokens came from, never on their values: a prompt adds
  only given nodes, and a completion always gets its own node, even beside an equal one.
- Every sampled token is trained in exactly one branch, the oldest that contains it, after exactly the tokens that it
  was sampled after, unless it was forced: no other one was possible there, so its logprob is 0 under any weights. A
  forced token is not trained, and no length or denominator of a loss counts it. A branch that trains none is no sample.
- What is known of a turn, such as its advantage, is known of the nodes that its tokens are in: a node refers to it.
- `(group_id, sample)` names one branch. In a group of n rollouts, the first branch of rollout r has the number r, and
  the b-th branch after it r + b * n. So `sample % n` is the rollout.
- A token is not trained if nobody knows which experts computed a token before it, while that of others is known: the
  trainer would choose some itself. They are counted (`TrainingSample.unrouted`).
- The loss is divided by the number of trained tokens, so branches do not add weight to the tokens that they share.
- Advantages (`policy.algorithms`) are computed over rollouts: one with many branches counts once in its group's mean.
- In a demonstration the policy's turns are trained, with their stop tokens. No policy sampled them, so they have no
  logprobs and no versions.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import RequestError
from titan_rl.support import Supports
from titan_rl.types import NO_VERSION, Completion, FinishReason, Message, ToolSpec, TrainingSample


@dataclass(slots=True, kw_only=True)
class Turn:
    """An answer of the policy."""

    prompt_token_ids: np.ndarray  # [T] int32
    completion: Completion
    """Without the tokens after a stop text that the program asked for."""
    message: Message
    """As the caller reads it."""
    finish_reason: FinishReason
    """As the caller is told: a turn that ended with a stop text counts as stopped."""
    seed: int = 0
    """Of its request."""
    rendered_anew: bool = False
    """Whether the prompt continues a sampled turn but had to be rendered anew, because it could not be proven to extend
    the sampled tokens. That happens if the program changed the answer, added an assistant message of its own, changed
    the tools, or if the chat format cannot be extended. First prompts, forks and histories edited before the answer do
    not count, because programs make them on purpose. Of several choices of one prompt only the first counts."""
    advantage: float | np.ndarray = 0.0
    """Of its sampled tokens, or of each [n]; known once the group is."""
    role: str = ""
    """Whose turn it is, as the task or the program says."""
    reward: float | None = None
    """That the task gave for it."""


def check(completion: Completion) -> None:
    """Raises RequestError where it is empty: such a turn could not be trained."""
    if not len(completion.token_ids):
        raise RequestError(f"{completion.generator or 'a generator'} answered {completion.request_id} with no token")


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens of one origin, a view of what was added."""

    parent: _Node | None
    token_ids: np.ndarray  # [n] int32
    turn: Turn | None
    """That sampled them; None: they were given."""
    children: list[_Node] = field(default_factory=list)  # oldest first
    start: int = 0
    """Of its tokens within what its turn sampled."""

    def split(self, at: int) -> _Node:
        """Return a node that ends after the first `at` tokens: this one, or a new parent that takes these tokens."""
        if at == len(self.token_ids):
            return self
        assert self.parent is not None  # the root has no tokens
        head = _Node(self.parent, self.token_ids[:at], self.turn, [self], self.start)
        self.start += at
        siblings = self.parent.children
        siblings[siblings.index(self)] = head
        self.parent = head
        self.token_ids = self.token_ids[at:]
        return head


class TokenTree:
    """Add turns with `add`, read samples with `training_samples`."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._root = _Node(None, np.zeros(0, np.int32), None)
        self.leaves = 0
        """How many branches there are."""
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn) -> None:
        """Add one turn, whose prompt is not empty and whose completion passes `check`."""
        prompt = turn.prompt_token_ids
        node, known = self._longest_known(prompt) if self._root.children else (self._root, 0)
        self.leaves += node is self._root or bool(node.children)
        if known < len(prompt):
            node.children.append(_Node(node, prompt[known:], None))
            node = node.children[-1]
        node.children.append(_Node(node, turn.completion.token_ids, turn))

    def _longest_known(self, tokens: np.ndarray) -> tuple[_Node, int]:
        """The end node of the longest path that is a prefix of `tokens`, and the path's length. Of equally long paths
        the youngest: a conversation most likely continues from its last turn."""
        best, within, longest = self._root, 0, 0
        pending = [(self._root, 0)]
        while pending:
            node, start = pending.pop()
            length = min(len(node.token_ids), len(tokens) - start)
            differs = np.flatnonzero(node.token_ids[:length] != tokens[start : start + length])
            common = int(differs[0]) if len(differs) else length
            if start + common > longest:
                best, within, longest = node, common, start + common
            if common == len(node.token_ids):
                pending.extend((child, start + common) for child in node.children)
        return best.split(within), longest

    def paths(self) -> Iterator[list[_Node]]:
        """From the root's children to every leaf, depth first, oldest first."""
        pending = [[child] for child in reversed(self._root.children)]
        while pending:
            path = pending.pop()
            while len(children := path[-1].children) == 1:
                path.append(children[0])
            if not children:
                yield path
            pending.extend([*path, child] for child in reversed(children))


def training_samples(
    group_id: int, graded: Iterable[tuple[int, float, TokenTree]], *, rollouts: int
) -> tuple[TrainingSample, ...]:
    """One sample per branch of some rollouts of a group, the oldest branch first; those that train nothing have none.

    All arrays are views of four, made at once: where rollouts are short, that takes a third of the time.

    Args:
        graded: number, reward and tokens of each rollout.
        rollouts: number of rollouts in the group, including failed ones.
    """
    paths = [
        (sample + number * rollouts, reward, path)
        for sample, reward, tree in graded
        for number, path in enumerate(tree.paths())
    ]
    nodes = [node for _, _, path in paths for node in path]
    if not nodes:
        return ()
    lengths = [len(node.token_ids) for node in nodes]
    token_ids, count = np.concatenate([node.token_ids for node in nodes]), sum(lengths)
    loss_mask, versions = np.zeros(count, np.bool_), np.full(count, NO_VERSION)
    logprobs, advantages = np.zeros(count, np.float32), np.zeros(count, np.float32)
    seen: set[_Node] = set()
    supports: list[tuple[Supports | None, int]] = []
    place = 0
    for node, length in zip(nodes, lengths, strict=True):
        support = None
        if (turn := node.turn) is not None and node not in seen:
            here, part, sampled = slice(place, place + length), slice(node.start, node.start + length), turn.completion
            loss_mask[here], logprobs[here], versions[here] = True, sampled.logprobs[part], sampled.versions[part]
            advantages[here] = turn.advantage if isinstance(turn.advantage, float) else turn.advantage[part]
            support = sampled.supports and sampled.supports.select(part)
        seen.add(node)
        supports.append((support, length))
        place += length
    samples = []
    end = last = 0
    for sample, reward, path in paths:
        start, end = end, end + sum(len(node.token_ids) for node in path)
        first, last = last, last + len(path)
        support, routes = Supports.join(supports[first:last]), _routes(path)
        unrouted = np.zeros(end - start, bool)
        if routes is not None:
            unrouted[1:] = np.logical_or.accumulate((routes[:-1] < 0).any((1, 2)))
            unrouted &= loss_mask[start:end]
        if support is not None or unrouted.any():
            left_out = np.flatnonzero(unrouted if support is None else support.forced | unrouted) + start
            loss_mask[left_out], logprobs[left_out], versions[left_out], advantages[left_out] = False, 0, NO_VERSION, 0
            if not (loss_mask[start:end].any() or unrouted.any()):
                continue
        samples.append(
            TrainingSample(
                group_id=group_id,
                sample=sample,
                token_ids=token_ids[start:end],
                loss_mask=loss_mask[start:end],
                logprobs=logprobs[start:end],
                versions=versions[start:end],
                advantages=advantages[start:end],
                reward=reward,
                supports=support,
                routes=routes,
                unrouted=int(unrouted.sum()),
            )
        )
    return tuple(samples)


def _routes(path: Sequence[_Node]) -> np.ndarray | None:
    """`TrainingSample.routes` of a branch: of each token as the first turn tells that sampled a token after it."""
    turns = (node.turn.completion.routes for node in path if node.turn is not None)
    known = next((each for each in turns if each is not None), None)
    if known is None:
        return None
    routes = np.full((sum(len(node.token_ids) for node in path), *known.shape[1:]), -1, np.int16)
    place = done = 0
    for node in path:
        start, place = place, place + len(node.token_ids)
        if node.turn is None:
            continue
        told = node.turn.completion
        if not node.start and told.prompt_routes is not None and done < start - 1:
            new = told.prompt_routes[done - start + 1 :]  # earlier turns may have told the first ones
            routes[start - 1 - len(new) : start - 1] = new
        if told.routes is not None:
            routes[start - 1 : place - 1] = told.routes[node.start :][: len(node.token_ids)]
        done = place - 1
    return routes


def demonstration_sample(
    group_id: int,
    sample: int,
    renderer: Renderer,
    prompt: Sequence[Message],
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    advantage: float = 0.0,
) -> TrainingSample:
    """The packed document of a demonstration, up to the policy's last turn. Its `messages` follow the prompt, a turn of
    the policy (role "assistant") first. Raises TaskError: they cannot be written in this tokenizer."""
    tree = TokenTree()
    before: list[int] = renderer.render(prompt, tools)
    taught: list[int] = []
    for by_policy, turn in groupby(messages, key=lambda message: message.role == "assistant"):
        if by_policy:
            taught = [token_id for message in turn for token_id in renderer.say(message)]
            completion = not_sampled("demonstration", taught, FinishReason.STOP, version=NO_VERSION)
            prompt_ids, said = np.array(before, dtype=np.int32), Message("assistant", "")
            tree.add(
                Turn(
                    prompt_token_ids=prompt_ids,
                    completion=completion,
                    message=said,
                    finish_reason=FinishReason.STOP,
                    advantage=advantage,
                )
            )
        else:
            before = [*before, *taught, *renderer.extend(before, taught, list(turn), tools)]
    (document,) = training_samples(group_id, [(sample, 0.0, tree)], rollouts=1)
    return document


def not_sampled(request_id: str, token_ids: Sequence[int], reason: FinishReason, *, version: int = 0) -> Completion:
    """A completion that no engine has drawn: its logprobs and versions mean nothing."""
    count = len(token_ids)
    return Completion(
        request_id=request_id,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.zeros(count, dtype=np.float32),
        versions=np.full(count, version, dtype=np.int64),
        finish_reason=reason,
    )
