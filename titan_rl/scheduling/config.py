"""The three numbers that decide how far generation may run ahead of training, and what they imply."""

from dataclasses import dataclass

from titan_rl.one_line import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessLimits:
    """How groups are scheduled. Everything else follows from these."""

    groups_per_step: int
    """P: prompt groups that every optimizer step trains, no more and no fewer."""
    max_staleness: int = 0
    """S: steps that generation may run ahead of training. 0: a group is trained by the very policy that sampled it."""
    window: int = 1
    """W: how far batches look past the oldest group that is not finished. 1: strictly in order of admission. More
    lets finished groups overtake a slow one, at the price of up to ⌈(W - 1)/P⌉ further steps of staleness."""

    deterministic: bool = False
    """Groups are admitted in logical time: the run is a function of its config and seed. The window is 1 then."""

    @property
    def exact_versions(self) -> bool:
        """Whether each group is sampled by exactly one version, which is served until the group has ended."""
        return self.deterministic and self.max_staleness > 0

    @property
    def slots(self) -> int:
        """(S + 1)·P: groups that are admitted and whose training is not yet published."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def overtaking(self) -> int:
        """⌈(W - 1)/P⌉: steps of staleness that the window adds; 0 at S = 0, where a batch is all that is in flight."""
        return -(-(self.window - 1) // self.groups_per_step) if self.max_staleness else 0

    @property
    def bound(self) -> int:
        """S + ⌈(W - 1)/P⌉, and 0 at S = 0: steps of age at which a sample is trained at most (see `group_buffer`)."""
        return self.max_staleness + self.overtaking

    def describe(self) -> str:
        """The one line that a run prints."""
        window = "in order" if self.window == 1 else f"window {self.window}"
        if self.bound == 0:
            age = "every sample is on-policy"
        else:
            sum_ = f" ({self.max_staleness} + {self.overtaking} for the window)" if self.overtaking else ""
            # The mean by Little's law: (S + 1)·P groups inside, P leave per step, so each stays S + 1 steps on average,
            # the last of which trains it. Empty slots, and tokens sampled after a later update, make it less.
            most = counted(self.bound, "step")
            age = f"a sample is at most {most} old{sum_}, on average at most {self.max_staleness}"
        limits = f"{self.groups_per_step} groups per step, max staleness {self.max_staleness}, {window}"
        return f"{limits}: {self.slots} groups in flight; {age}"
