"""The tokens of one rollout, whoever makes its turns: a tree in which every token is stored once and trained once.

    graph.add([1 2 3], sampled [4 5])                 123 ── 45*                        * sampled
    graph.add([1 2 3 4 5 6], sampled [7])             123 ── 45* ── 6 ── 7*             goes on: still one branch
    graph.add([1 2 9], sampled [4])                   12 ─┬─ 3 ── 45* ── 6 ── 7*        an edited history: two branches
                                                          └─ 9 ── 4*

- A turn is the exact tokens that an engine was given and what it sampled after them. Its prompt follows the longest
  path whose tokens it repeats; only what differs is added, so appending keeps one branch and anything else makes one.
- A node is either given or sampled, which is decided by where its tokens came from and never by what they are: a
  prompt adds given nodes only, a completion is always a node of its own, also beside an equal one.
- Every sampled token is trained in exactly one branch, the oldest that holds it, behind exactly the tokens that it was
  sampled behind. Every branch trains at least one token: a turn in which nothing was sampled is refused.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from titan_rl.errors import GeneratorFailed, RequestError
from titan_rl.types import NO_VERSION, Completion

_NONE = np.zeros(0)
"""Logprobs and versions of given tokens."""


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
        """The node that ends after `at` of these tokens: this one, or a new parent that takes them over."""
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


@dataclass(frozen=True, slots=True)
class Branch:
    """One path from the beginning of a conversation to a leaf, and which of its tokens are trained with it."""

    token_ids: np.ndarray  # [L] int32
    loss_mask: np.ndarray  # [L] bool, True where sampled and in no older branch
    logprobs: np.ndarray  # [L] float32, 0 where not trained
    versions: np.ndarray  # [L] int64, NO_VERSION where not trained


class TokenGraph:
    """Grows by turns; read by `branches`."""

    def __init__(self) -> None:
        self._root = _Node(None, np.zeros(0, np.int32), False, _NONE, _NONE)
        self.completions: list[Completion] = []
        """Of all turns, in the order in which they were added."""

    def add(self, prompt_token_ids: Sequence[int] | np.ndarray, completion: Completion) -> None:
        """One turn.

        Args:
            prompt_token_ids: [T >= 1] all tokens that the engine was given.
            completion: what it sampled; may be cut off.

        Raises:
            RequestError: it sampled nothing, so what the policy is said to have answered could not be trained.
            GeneratorFailed: the completion's arrays differ in length.
            ValueError: the prompt is empty: a token that nothing precedes cannot be trained.
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
        node, known = self._longest_known(prompt)
        if known < len(prompt):
            node = node.grow(prompt[known:], sampled=False)
        node.grow(completion.token_ids, sampled=True, logprobs=completion.logprobs, versions=completion.versions)

    def branches(self) -> Iterator[Branch]:
        """One per leaf, oldest first."""
        trained: set[int] = set()
        for path in self._paths():
            token_ids = np.concatenate([node.token_ids for node in path])
            branch = Branch(
                token_ids,
                loss_mask=np.zeros(len(token_ids), dtype=bool),
                logprobs=np.zeros(len(token_ids), dtype=np.float32),
                versions=np.full(len(token_ids), NO_VERSION, dtype=np.int64),
            )
            end = 0
            for node in path:
                start, end = end, end + len(node.token_ids)
                if node.sampled and id(node) not in trained:
                    trained.add(id(node))
                    branch.loss_mask[start:end] = True
                    branch.logprobs[start:end] = node.logprobs
                    branch.versions[start:end] = node.versions
            yield branch

    @property
    def leaves(self) -> int:
        """How many branches there are."""
        return sum(1 for _ in self._paths())

    def _longest_known(self, tokens: np.ndarray) -> tuple[_Node, int]:
        """The node that ends the longest path which `tokens` begin with, and that path's length. Of equally long ones
        the youngest: what a conversation goes on from is most likely what was said last."""
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

    def _paths(self) -> Iterator[list[_Node]]:
        """From the root's children to every leaf, depth first, oldest first."""
        pending = [(child, [child]) for child in reversed(self._root.children)]
        while pending:
            node, path = pending.pop()
            if not node.children:
                yield path
            pending.extend((child, [*path, child]) for child in reversed(node.children))


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
