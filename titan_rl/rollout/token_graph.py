"""The tokens of one rollout as a tree in which every token is stored once and trained once.

    graph.add([1 2 3], sampled [4 5])                 123 ── 45*                        * sampled
    graph.add([1 2 3 4 5 6], sampled [7])             123 ── 45* ── 6 ── 7*             goes on: still one branch
    graph.add([1 2 9], sampled [4])                   12 ─┬─ 3 ── 45* ── 6 ── 7*        an edited history: two branches
                                                          └─ 9 ── 4*

- A turn is the exact prompt tokens that an engine got and the tokens that it sampled. The prompt shares the longest
  path that it begins with; only the rest is added. So a prompt that extends a leaf keeps its branch, and any other one
  starts a new branch.
- A node is either given or sampled. That depends on where its tokens came from, never on their values: a prompt adds
  only given nodes, and a completion always gets its own node, even beside an equal one.
- Every sampled token is trained in exactly one branch, the oldest that contains it, after exactly the tokens that it
  was sampled after. Every branch trains at least one token, because a turn without sampled tokens is refused.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from titan_rl.errors import GeneratorFailed, RequestError
from titan_rl.types import NO_VERSION, Completion

_NONE = np.zeros(0, np.int32)
"""Tokens of the root; logprobs and versions of given tokens."""


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens of one origin; its arrays are views of what was added."""

    parent: _Node | None
    token_ids: np.ndarray  # [n] int32
    sampled: bool
    logprobs: np.ndarray  # [n] float32; empty where given
    versions: np.ndarray  # [n] int64; empty where given
    children: list[_Node] = field(default_factory=list)  # oldest first

    def split(self, at: int) -> _Node:
        """Return a node that ends after the first `at` tokens: this one, or a new parent that takes these tokens."""
        if at == len(self.token_ids):
            return self
        assert self.parent is not None  # the root has no tokens
        head = _Node(self.parent, self.token_ids[:at], self.sampled, self.logprobs[:at], self.versions[:at], [self])
        siblings = self.parent.children
        siblings[siblings.index(self)] = head
        self.parent = head
        self.token_ids, self.logprobs, self.versions = self.token_ids[at:], self.logprobs[at:], self.versions[at:]
        return head

    def grow(
        self, token_ids: np.ndarray, *, sampled: bool, logprobs: np.ndarray = _NONE, versions: np.ndarray = _NONE
    ) -> _Node:
        child = _Node(self, token_ids, sampled, logprobs, versions)
        self.children.append(child)
        return child


class Branch(NamedTuple):
    """One path from the beginning of a conversation to a leaf, and which of its tokens are trained with it."""

    token_ids: np.ndarray  # [L] int32
    loss_mask: np.ndarray  # [L] bool, True where sampled and in no older branch
    logprobs: np.ndarray  # [L] float32, 0 where not trained
    versions: np.ndarray  # [L] int64, NO_VERSION where not trained


class TokenGraph:
    """Add turns with `add`, read samples with `branches_of`."""

    def __init__(self) -> None:
        self._root = _Node(None, _NONE, False, _NONE, _NONE)
        self.completions: list[Completion] = []
        """Of all turns, in the order in which they were added."""
        self.leaves = 0
        """How many branches there are."""

    def add(self, prompt_token_ids: Sequence[int] | np.ndarray, completion: Completion) -> None:
        """Add one turn.

        Args:
            prompt_token_ids: [T >= 1] all prompt tokens that the engine got.
            completion: the sampled tokens; may be cut off.

        Raises:
            RequestError: the completion is empty, so the turn could not be trained.
            GeneratorFailed: the completion's arrays differ in length.
            ValueError: the prompt is empty: the first token of a sample cannot be trained.
        """
        sampled = len(completion.token_ids)
        if not sampled == len(completion.logprobs) == len(completion.versions):
            raise GeneratorFailed(
                f"{completion.generator or 'a generator'} answered {completion.request_id} with {sampled} tokens, "
                f"{len(completion.logprobs)} logprobs and {len(completion.versions)} versions"
            )
        prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        if not len(prompt):
            raise ValueError(f"the prompt of {completion.request_id} is empty")
        if not sampled:
            raise RequestError(
                f"{completion.generator or 'a generator'} answered {completion.request_id} with no token"
            )
        self.completions.append(completion)
        node, known = self._longest_known(prompt) if self._root.children else (self._root, 0)
        self.leaves += node is self._root or bool(node.children)
        if known < len(prompt):
            node = node.grow(prompt[known:], sampled=False)
        node.grow(completion.token_ids, sampled=True, logprobs=completion.logprobs, versions=completion.versions)

    def _longest_known(self, tokens: np.ndarray) -> tuple[_Node, int]:
        """The end node of the longest path that is a prefix of `tokens`, and the path's length. Of equally long paths
        the youngest: a conversation most likely continues from its last turn."""
        best, within, longest = self._root, 0, 0
        pending = [(self._root, 0)]
        while pending:
            node, start = pending.pop()
            common = _common_prefix(node.token_ids, tokens[start:])
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


def branches_of(graphs: Iterable[TokenGraph]) -> list[list[Branch]]:
    """Of each graph, one branch per leaf, oldest first. All arrays are views of four, made at once: where rollouts are
    short, that takes a third of the time."""
    paths = [[*graph.paths()] for graph in graphs]
    nodes = [node for its in paths for path in its for node in path]
    if not nodes:
        return [[] for _ in paths]
    lengths = [len(node.token_ids) for node in nodes]
    no_logprobs, no_versions = np.zeros(max(lengths), np.float32), np.full(max(lengths), NO_VERSION)
    seen: set[_Node] = set()
    trained, logprobs, versions = [], [], []
    for node, length in zip(nodes, lengths, strict=True):
        new = node.sampled and node not in seen
        seen.add(node)
        trained.append(new)
        logprobs.append(node.logprobs if new else no_logprobs[:length])
        versions.append(node.versions if new else no_versions[:length])
    token_ids = np.concatenate([node.token_ids for node in nodes])
    loss_mask = np.repeat(trained, lengths)
    all_logprobs = np.concatenate(logprobs, dtype=np.float32)
    all_versions = np.concatenate(versions, dtype=np.int64)
    branches: list[list[Branch]] = []
    end = 0
    for its in paths:
        branches.append([])
        for path in its:
            start, end = end, end + sum(len(node.token_ids) for node in path)
            cut = slice(start, end)
            branches[-1].append(Branch(token_ids[cut], loss_mask[cut], all_logprobs[cut], all_versions[cut]))
    return branches


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
