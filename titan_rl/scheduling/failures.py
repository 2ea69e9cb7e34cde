"""Whether so many of the newest rollouts failed that the run is to stop.

- Each kind of failure is counted by itself: another thing has to be changed for it.
- Only rollouts of training count, in the order in which their groups are decided. A run that was resumed counts anew.
"""

from collections import Counter
from collections.abc import Sequence

from titan_rl.metrics.metric_table import metric_of
from titan_rl.metrics.rollout_record import Failed

NEWEST = 256
"""Rollouts that count: a run that has gone well for long stops soon after something breaks."""
FEWEST = 64
"""Rollouts before which no share is taken: a few failures may be those of the first prompts alone."""


def too_many_failures(rollouts: Sequence[Failed | None], most: float) -> str:
    """Why a run is to stop; empty: it may go on.

    Args:
        rollouts: the newest ones, at most `NEWEST`; None: it did not fail.
        most: share of the rollouts that one kind of failure may have (`rollout.failure_share`).
    """
    causes = Counter(filter(None, rollouts))
    kinds = Counter(kind for kind, _ in causes.elements())
    for kind, count in kinds.most_common(1):
        if len(rollouts) >= FEWEST and (share := count / len(rollouts)) > most:
            times, cause = max((times, cause) for (failure, cause), times in causes.items() if failure is kind)
            metric = metric_of(f"rollout/failed_{kind}")
            return (
                f"{kind} failures: {count} of the last {len(rollouts)} rollouts ({share:.0%}), more than "
                f"rollout.failure_share = {most:g}; {times} × {cause}; {metric.do if metric else ''}"
            )
    return ""
