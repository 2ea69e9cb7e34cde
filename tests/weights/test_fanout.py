"""The schedule of a publication over hosts, and its simulated clock (2 s)."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.weights.fanout import parents, seconds


@given(sources=st.integers(1, 4), receivers=st.integers(0, 300), chunks=st.integers(0, 9))
def test_each_receiver_gets_each_chunk_once_in_few_hops_and_nobody_sends_more_than_a_copy(
    sources: int, receivers: int, chunks: int
) -> None:
    roots = [f"source{number}" for number in range(sources)]
    hosts = [f"host{number}" for number in range(receivers)]
    schedule = parents(roots, [*hosts, *roots])
    assert schedule.keys() == set(hosts)
    share = -(-receivers // sources)
    sent: Counter[str] = Counter()
    for chunk in range(chunks):
        for host in hosts:
            sent[schedule[host][chunk % 2]] += 1  # of what every receiver gets once, by its one parent in the tree
            hops, at = 1, schedule[host][chunk % 2]
            while at not in roots:
                hops, at = hops + 1, schedule[at][chunk % 2]
            assert hops <= math.floor(math.log2(share)) + 1
    assert all(sent[root] <= chunks for root in roots)
    assert all(sent[host] <= 2 * math.ceil(chunks / 2) for host in hosts)
    inner = [{of_tree[tree] for of_tree in schedule.values()} - set(roots) for tree in (0, 1)]
    assert inner[0].isdisjoint(inner[1])
    if receivers // sources >= 6:
        assert not any(host in schedule[other] for host in hosts for other in schedule[host] if other not in roots)


def test_a_receiver_alone_takes_everything_from_the_source() -> None:
    assert parents(["trainer"], ["trainer", "other"]) == {"other": ("trainer", "trainer")}


def test_the_time_is_that_of_one_copy_however_many_hosts_there_are() -> None:
    def copies(hosts: int) -> float:
        schedule = parents(["trainer"], [f"host{number}" for number in range(hosts)])
        return seconds(schedule, chunks=256, chunk_seconds=1 / 256, hop_seconds=0.001)

    assert 1 <= copies(1) < copies(10) < copies(100) < copies(1000) < 1.2


def test_without_a_tree_the_time_is_that_of_a_copy_per_host() -> None:
    direct = {f"host{number}": ("trainer", "trainer") for number in range(10)}
    assert seconds(direct, chunks=8, chunk_seconds=1 / 8, hop_seconds=0) == pytest.approx(10)
