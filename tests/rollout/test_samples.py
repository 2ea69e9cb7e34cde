"""Conversations as trees: every sampled token is trained once, behind what it was sampled behind (3 s)."""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.supports import impossible

from titan_rl.errors import RequestError
from titan_rl.rollout.samples import TokenTree, Turn, check, training_samples
from titan_rl.support import Supports, encode_support
from titan_rl.types import NO_VERSION, Completion, FinishReason, Message, TrainingSample

VOCAB = 8


def completion(tokens, *, logprobs=None, versions=None, finish_reason=FinishReason.STOP, possible=()) -> Completion:
    """`possible`: how many of `VOCAB` ids each token was drawn from, from itself on; all of them by default."""
    supports = {
        place: encode_support(np.isin(np.arange(VOCAB), (tokens[place] + np.arange(count)) % VOCAB))
        for place, count in enumerate(possible)
    }
    return Completion(
        request_id="r",
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.array([-1.0] * len(tokens) if logprobs is None else logprobs, dtype=np.float32),
        versions=np.array([0] * len(tokens) if versions is None else versions, dtype=np.int64),
        finish_reason=finish_reason,
        supports=Supports.of(supports, 0, len(tokens)),
    )


def turn_of(prompt, sampled: Completion, **known) -> Turn:
    return Turn(
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        completion=sampled,
        message=Message("assistant", ""),
        finish_reason=sampled.finish_reason,
        **known,
    )


def tree_of(*turns) -> TokenTree:
    tree = TokenTree()
    for prompt, sampled in turns:
        tree.add(turn_of(prompt, completion(sampled)))
    return tree


def samples_of(tree) -> tuple[TrainingSample, ...]:
    return training_samples(0, [(0, 0.0, tree)], rollouts=1)


def stored_tokens(tree) -> int:
    """Tokens that the nodes hold, given and sampled."""
    return sum(len(node.token_ids) for node in {id(node): node for path in tree.paths() for node in path}.values())


def shown(tree) -> list[str]:
    """Branches as text, trained tokens marked."""
    return [
        " ".join(f"{token}*" if trained else f"{token}" for token, trained in zip(*each, strict=True))
        for each in ((branch.token_ids.tolist(), branch.loss_mask.tolist()) for branch in samples_of(tree))
    ]


def test_a_fork_trains_what_it_shares_once():
    tree = tree_of(([1], [2, 3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 4, 7], [8]))
    assert shown(tree) == ["1 2* 3* 4* 5 6*", "1 2 3 4 7 8*"]


def test_equal_answers_to_one_prompt_are_two_that_were_sampled():
    tree = tree_of(([1], [2, 3]), ([1], [2, 3]))
    assert shown(tree) == ["1 2* 3*", "1 2* 3*"]
    tree.add(turn_of([1, 2, 3, 4], completion([5])))  # goes on from the younger one
    assert shown(tree) == ["1 2* 3*", "1 2* 3* 4 5*"]


def routed(sampled, prompt, *, unknown=(), told_from=0) -> Completion:
    """The experts of position p are p and p + 10 times the number of the first sampled token; `unknown`: positions."""
    places = np.arange(prompt + len(sampled) - 1)
    routes = np.stack([places, places + 10 * sampled[0]], -1)[:, None].astype(np.int16)
    routes[list(unknown)] = -1
    return replace(completion(sampled), prompt_routes=routes[told_from : prompt - 1], routes=routes[prompt - 1 :])


@pytest.mark.parametrize("told_from", [0, 4])  # the turn before tells the first four
def test_each_token_has_the_experts_of_the_first_turn_that_sampled_a_token_after_it(told_from):
    tree = TokenTree([turn_of([1, 1], routed([2, 3, 4], 2))])
    tree.add(turn_of([1, 1, 2, 3, 4, 5], routed([6], 6, told_from=told_from)))
    tree.add(turn_of([1, 1, 2, 3, 7], routed([5], 5)))
    first, second = samples_of(tree)
    assert first.routes[:, 0].tolist() == [[p, p + (20 if p < 4 else 60)] for p in range(6)] + [[-1, -1]]
    assert second.routes[:, 0].tolist() == [[p, p + (20 if p < 3 else 50)] for p in range(5)] + [[-1, -1]]
    assert (first.unrouted, second.unrouted, first.route_shape) == (0, 0, (1, 2))


@pytest.mark.parametrize(("unknown", "trained"), [((2,), [2]), ((0,), []), ((), [2, 3, 4])])
def test_a_token_after_one_whose_experts_are_not_known_is_counted_and_not_trained(unknown, trained):
    tree = TokenTree([turn_of([1, 1], routed([2, 3, 4], 2, unknown=unknown))])
    (sample,) = samples_of(tree)
    assert sample.token_ids[sample.loss_mask].tolist() == trained and sample.unrouted == 3 - len(trained)
    assert (sample.versions[~sample.loss_mask] == NO_VERSION).all() and not sample.logprobs[~sample.loss_mask].any()


def test_a_later_turn_that_tells_no_experts_is_not_trained_and_what_comes_after_it_neither():
    tree = TokenTree([turn_of([1], routed([2, 3], 1)), turn_of([1, 2, 3, 4], completion([5, 6]))])
    tree.add(turn_of([1, 2, 3, 4, 5, 6], routed([7], 6)))
    (sample,) = samples_of(tree)
    assert sample.token_ids[sample.loss_mask].tolist() == [2, 3] and sample.unrouted == 3


def test_a_turn_without_a_sampled_token_is_refused():
    with pytest.raises(RequestError, match="answered r with no token"):
        check(completion([]))
    assert samples_of(TokenTree()) == () and not stored_tokens(TokenTree())


def test_branches_are_samples_of_their_own_in_which_every_turn_has_its_advantage():
    turns = [turn_of(prompt, completion([token])) for prompt, token in (([1], 2), ([1, 2, 5], 6), ([7], 8), ([9], 3))]
    tree = TokenTree()
    for turn in turns:
        tree.add(turn)
    for turn, advantage in zip(turns, (0.5, -0.5, 1.5, -0.5), strict=True):  # known when the whole group is
        turn.advantage = advantage
    samples = training_samples(7, [(3, 0.25, tree)], rollouts=8)
    assert [(sample.group_id, sample.sample) for sample in samples] == [(7, 3), (7, 11), (7, 19)]
    assert [sample.advantages.tolist() for sample in samples] == [[0, 0.5, 0, -0.5], [0, 1.5], [0, -0.5]]
    assert [sample.reward for sample in samples] == [0.25] * 3
    arrays = ("token_ids", "loss_mask", "logprobs", "versions", "advantages")
    assert [getattr(samples[0], name).dtype for name in arrays] == [np.int32, bool, np.float32, np.int64, np.float32]


def test_a_turn_whose_tokens_differ_in_advantage_keeps_them_where_a_later_prompt_cuts_it():
    whole, cut = turn_of([1], completion([2, 3, 4])), turn_of([1, 2, 3, 9], completion([5]))
    tree = TokenTree()
    tree.add(whole)
    tree.add(cut)
    whole.advantage, cut.advantage = np.array([0.1, 0.2, 0.3]), 1.0
    first, second = training_samples(0, [(0, 0.0, tree)], rollouts=1)
    assert first.advantages.tolist() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert second.advantages.tolist() == [0, 0, 0, 0, 1], "what a sample before trains has none here"


def test_a_forced_token_is_not_trained_and_a_branch_of_nothing_else_is_no_sample():
    tree = TokenTree()
    for prompt, sampled, possible in (([1], [2, 3, 4], [VOCAB, 1, 2]), ([1, 2, 3, 9], [5], [1]), ([7], [8, 6], [1, 3])):
        tree.add(turn_of(prompt, completion(sampled, possible=possible, logprobs=[-1.0 / each for each in possible])))
    assert shown(tree) == ["1 2* 3 4*", "7 8 6*"] and tree.leaves == 3
    first, second = samples_of(tree)
    assert (first.versions.tolist(), first.logprobs.tolist()) == ([-1, 0, -1, 0], [0, -0.125, 0, -0.5])
    assert (first.sample, second.sample) == (0, 2), "a branch keeps its number"
    assert impossible(second.supports, (3, VOCAB)).sum(1).tolist() == [0, VOCAB - 1, VOCAB - 3]


# Random conversations against a naive book of every token there is.

token = st.integers(0, 3)  # few values, so that histories agree by chance and policies forge what others said
sampled_token = st.tuples(
    token, st.floats(-20, 0, width=32), st.integers(0, 5), st.sampled_from([VOCAB, VOCAB, VOCAB - 1, 3, 1])
)
turn = st.fixed_dictionaries(
    {
        "how": st.sampled_from(["append", "append", "append", "edit", "cut", "fork", "fresh"]),
        "which": st.integers(0, 20),  # of the turns so far
        "where": st.integers(0, 40),  # of its tokens
        "given": st.lists(token, max_size=5),  # what user, environment or tool (an error too) put in front
        "sampled": st.lists(sampled_token, min_size=1, max_size=5),  # may be cut off
    }
)


@dataclass
class Known:
    """A token with its origin."""

    number: int  # in the order of their coming
    token: int
    sampled: bool
    logprob: float = 0.0
    version: int = NO_VERSION
    possible: int = VOCAB


@dataclass
class Book:
    """Every conversation as the list of all its tokens; nothing shared but the `Known` objects themselves."""

    paths: list[list[Known]] = field(default_factory=list)
    count: int = 0

    def new(self, *args) -> Known:
        self.count += 1
        return Known(self.count, *args)

    def add(self, prompt, sampled):
        best: list[Known] = []
        for path in self.paths:
            same = 0
            while same < min(len(path), len(prompt)) and path[same].token == prompt[same]:
                same += 1
            # the longest; of equally long ones the youngest
            best = max(best, path[:same], key=lambda known: (len(known), [each.number for each in known]))
        given = [self.new(value, False) for value in prompt[len(best) :]]
        self.paths.append([*best, *given, *(self.new(value, True, *rest) for value, *rest in sampled)])

    def leaves(self):
        numbers = [[known.number for known in path] for path in self.paths]
        return [
            path
            for path, mine in zip(self.paths, numbers, strict=True)
            if not any(len(other) > len(mine) and other[: len(mine)] == mine for other in numbers)
        ]


@settings(deadline=None, max_examples=300)  # the machine may be busy
@given(st.lists(turn, min_size=1, max_size=12))
def test_random_conversations_train_what_was_sampled_once_and_in_its_place(turns):
    tree, book, histories = TokenTree(), Book(), []
    for each in turns:
        history = histories[each["which"] % len(histories)] if histories else []
        where = each["where"] % (len(history) + 1)
        match each["how"]:
            case "append":
                prompt = [*(histories[-1] if histories else []), *each["given"]]
            case "edit":
                prompt = [*history[:where], *each["given"], *history[where + 1 :]]
            case "cut":
                prompt = [*history[:where], *each["given"]]
            case "fork":
                prompt = [*history, *each["given"]]
            case _:
                prompt = each["given"]
        prompt = prompt or [0]
        tokens, logprobs, versions, possible = ([part[index] for part in each["sampled"]] for index in range(4))
        cut = FinishReason.LENGTH
        sampled = completion(tokens, logprobs=logprobs, versions=versions, finish_reason=cut, possible=possible)
        tree.add(turn_of(prompt, sampled))
        book.add(prompt, each["sampled"])
        histories.append([*prompt, *tokens])

    branches = samples_of(tree)
    # what each sampled token was sampled behind, by its number, derived from the paths alone
    expected = sorted(
        (tuple(known.token for known in path[:index]), known.token, known.logprob, known.version, known.possible)
        for number, (path, index, known) in {
            known.number: (path, index, known)
            for path in book.paths
            for index, known in enumerate(path)
            if known.sampled and known.possible > 1
        }.items()
    )
    trained = sorted(
        (
            tuple(branch.token_ids[:index].tolist()),
            int(branch.token_ids[index]),
            float(branch.logprobs[index]),
            int(branch.versions[index]),
            VOCAB - int(impossible(branch.supports, (len(branch.token_ids), VOCAB))[index].sum()),
        )
        for branch in branches
        for index in np.flatnonzero(branch.loss_mask)
    )
    assert trained == expected
    sampled = [possible for each in turns for *_, possible in each["sampled"]]
    assert len(expected) == len(sampled) - sampled.count(1)
    leaves = Counter(tuple(known.token for known in path) for path in book.leaves())
    trained = Counter(tuple(branch.token_ids.tolist()) for branch in branches)
    assert tree.leaves == leaves.total()
    assert trained == leaves if 1 not in sampled else trained <= leaves
    assert stored_tokens(tree) == len({known.number for path in book.paths for known in path})
    for branch in branches:
        assert branch.loss_mask.any() and not branch.loss_mask[0]
        assert not branch.logprobs[~branch.loss_mask].any()
        assert (branch.versions[~branch.loss_mask] == NO_VERSION).all()


def test_what_no_turn_tells_of_a_branch_is_not_known():
    """The longest prefix that is known belongs to a turn before that was given it."""
    tree = TokenTree([turn_of([1, 2, 3, 4, 5], routed([9], 5)), turn_of([1, 2], routed([3], 2))])
    tree.add(turn_of([1, 2, 3, 4, 6], routed([7], 5, told_from=2)))
    (last,) = [each for each in samples_of(tree) if each.token_ids.tolist() == [1, 2, 3, 4, 6, 7]]
    assert last.routes[:, 0, 0].tolist() == [-1, -1, 2, 3, 4, -1] and last.unrouted == 1
