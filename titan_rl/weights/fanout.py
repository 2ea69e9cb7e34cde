"""From which hosts each host takes the chunks of a publication, so that every link carries about one copy of it.

The receivers of a source are in two trees: even chunks go down one, odd chunks down the other (Sanders, Speck, Träff:
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL's double binary tree is the same).

    even chunks   source ─▶ b ─▶ a, c          odd chunks   source ─▶ c ─▶ b, a          of receivers a, b, c

What always holds, for n receivers of a source and c chunks:

- a receiver gets every chunk once: it has one parent in each tree;
- a receiver hands chunks on in one tree at most, to two others at most: it sends at most 2 * ceil(c / 2) chunks, which
  is one copy (and one chunk more, if c is odd). A source sends each chunk once;
- a chunk makes at most floor(log2(n)) + 1 hops;
- of six receivers and more no two take from each other: what one asks of the other would wait behind what it sends.

Several sources, which all hold everything, share the receivers. Pure: the relays and the simulated clock read the same
schedule.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

Parents = Mapping[str, tuple[str, str]]
"""By receiver, the hosts that it takes even and odd chunks from."""


def parents(sources: Sequence[str], hosts: Sequence[str]) -> Parents:
    """The schedule for these hosts; those among the sources receive nothing."""
    receivers = [host for host in hosts if host not in sources]
    found: dict[str, tuple[str, str]] = {}
    for turn, source in enumerate(sources):
        share = receivers[turn :: len(sources)]
        last = len(share)
        # A receiver with an even position in one order has an odd one, which is a leaf's, in the other. The leaves of
        # the first order come into the second one half an order away, so that no neighbours are neighbours again.
        leaves, others = share[::2], share[1::2]
        half = (len(leaves) + 1) // 2
        even = [source, *share]
        odd = [source, *(host for pair in zip_longest(others, leaves[half:] + leaves[:half]) for host in pair if host)]
        odd_parents = {odd[position]: odd[_up(position, last)] for position in range(1, last + 1)}
        found |= {host: (even[_up(at, last)], odd_parents[host]) for at, host in enumerate(share, 1)}
    return found


def _up(position: int, last: int) -> int:
    """The parent of a position in the in-order binary tree over 1 … last; 0 is the source. Odd positions are leaves."""
    bit = position & -position
    up = position ^ bit | bit << 1
    return up if up <= last else position ^ bit


def seconds(schedule: Parents, *, chunks: int, chunk_seconds: float, hop_seconds: float) -> float:
    """Until every host has every chunk, in simulated time.

    Args:
        chunk_seconds: one chunk on one link. A host's link carries one chunk in each direction at a time, the first one
            that is ready; the network holds what a receiver's link cannot take yet.
        hop_seconds: from the last byte of a chunk on the link until it can be handed on.
    """
    children = defaultdict(list)
    for host, of_tree in schedule.items():
        for tree, parent in enumerate(of_tree):
            children[parent, tree].append(host)
    ready = [
        (0.0, chunk, host, child)
        for (host, tree), theirs in children.items()
        if host not in schedule
        for chunk in range(tree, chunks, 2)
        for child in theirs
    ]
    heapq.heapify(ready)
    sends_until: dict[str, float] = defaultdict(float)
    receives_until: dict[str, float] = defaultdict(float)
    end = 0.0
    while ready:
        at, chunk, sender, receiver = heapq.heappop(ready)
        if sends_until[sender] > at:
            heapq.heappush(ready, (sends_until[sender], chunk, sender, receiver))
            continue
        sends_until[sender] = at + chunk_seconds
        receives_until[receiver] = max(at, receives_until[receiver]) + chunk_seconds
        here = receives_until[receiver] + hop_seconds
        end = max(end, here)
        for child in children[receiver, chunk % 2]:
            heapq.heappush(ready, (here, chunk, receiver, child))
    return end
