"""Which group ends what plays it, and which is lost with others.

    a group is lost SUSPECTED times in a row with its worker ─▶ a suspect: no other suspect is played at its worker
    a suspect is lost with its worker, or engines die under a group,
        and others have ended since its last loss, or its worker plays no others ─▶ counts
    a group has lost what counts GUILTY times ─▶ it is to blame

A loss by itself says nothing: hosts are preempted, processes run out of memory, somebody kills one. So a group is
played again as often as it takes. It is to blame only if what plays it dies with it again and again, and lives while
others are played. A group that reaches its end is suspected of nothing any more. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

SUSPECTED = 3
"""Losses in a row. Fewer would play many groups one after the other for nothing, where a host is lost."""

GUILTY = 4
"""More would cost a worker each; fewer might be chance."""


@dataclass(slots=True)
class _Losses:
    with_worker: int = 0
    counted: int = 0
    ended_before: int = 0
    """Groups that had ended at its last loss."""


class Suspects:
    """The groups that were lost, by any name."""

    def __init__(self) -> None:
        self._ended = 0
        self._losses: dict[Hashable, _Losses] = {}

    def __contains__(self, group: Hashable) -> bool:
        return group in self._losses and self._losses[group].with_worker >= SUSPECTED

    def lost(self, group: Hashable, *, with_worker: bool, alone: bool) -> bool:
        """A group was lost. Returns whether it is to blame.

        Args:
            with_worker: its worker is lost too.
            alone: its worker played no other group meanwhile.
        """
        suspect = group in self
        losses = self._losses.setdefault(group, _Losses(ended_before=self._ended))
        losses.counted += (alone or self._ended > losses.ended_before) and (suspect or not with_worker)
        losses.with_worker += with_worker
        losses.ended_before = self._ended
        if losses.counted < GUILTY:
            return False
        del self._losses[group]
        return True

    def ended(self, group: Hashable) -> None:
        """A group reached its end."""
        self._ended += 1
        self._losses.pop(group, None)
