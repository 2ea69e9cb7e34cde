"""The numbers of a run: one record per step, for metrics, display and summary; how long its processes wait, and their
memory."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from titan_rl.data_plane.store import HeldReport
from titan_rl.errors import TitanError
from titan_rl.loop.recording import Recorder
from titan_rl.loop.stages import Evaluation
from titan_rl.loop.system import System
from titan_rl.metrics.activity import Activities
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.metrics.timeline import Pulse, memory, timeline
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.one_line import counted
from titan_rl.rollout.report import GroupReport, means
from titan_rl.routing.health import GONE
from titan_rl.rpc.mesh_client import MeshClient
from titan_rl.scheduling.group import Batch
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import NO_VERSION, FailureKind, PolicyVersion, StopReason
from titan_rl.view.conversation import transcript
from titan_rl.view.display import RunDisplay
from titan_rl.weights.manifest import FleetPull


@dataclass(slots=True)
class RunSummary:
    evaluations: list[Evaluation] = field(default_factory=list)
    steps: int = 0
    stopped_early: str = ""
    """Why the run stopped before its last step; empty if it did not."""
    reward_last: float = 0.0
    tokens_generated: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    """Samples by the age, in steps, at which they were trained."""
    failed: list[GroupReport] = field(default_factory=list)
    """Groups since the last step of which no rollout could be trained."""
    filtered_lengths: list[int] = field(default_factory=list)
    """Sampled tokens of the rollouts of groups that were filtered since the last step."""
    lost: int = 0
    """Groups that were lost and played again, each loss counted."""


@dataclass(eq=False)
class StepRecords:
    """Collects and writes."""

    summary: RunSummary
    """Of the steps so far, for those to come to be added."""
    buffer: GroupBuffer
    system: System
    recorder: Recorder
    activity: Activities
    display: RunDisplay
    metrics: MetricsWriter
    first_step_at: float | None = None
    """`time.monotonic()` after the first optimizer step of this process."""

    def __post_init__(self) -> None:
        self._pulses: Pulses = {}
        self._last_step = self.activity.clock()
        self._pull_failures: dict[str, str] = {}  # by generator: why it does not serve

    def failed(self, report: GroupReport) -> None:
        """Record a group of which no rollout could be trained. It counts in the next step's numbers and is displayed at
        once."""
        self.summary.failed.append(report)
        self.display.add_group(report.failures)

    def evaluation(self, evaluation: Evaluation) -> None:
        self.summary.evaluations.append(replace(evaluation, rollouts=()))
        self.recorder.evaluated(evaluation.rollouts)
        step, transcripts = evaluation.version.step, [*map(transcript, evaluation.rollouts)]
        self.display.evaluation(step, evaluation.exact_match, evaluation.reward, transcripts)
        if evaluation.failed:
            of = evaluation.failed + evaluation.prompts
            self.display.print_line(
                f"{evaluation.failed} of {of} held-out rollouts failed and are not counted; the first: "
                f"{evaluation.first_error}"
            )
        numbers = ("exact_match", "reward", "failed")
        self.metrics.write(step, {f"evaluation/{name}": getattr(evaluation, name) for name in numbers})

    def pulled(self, pull: FleetPull) -> None:
        """Say once for every reason why a generator does not serve."""
        for name in self.system.generators():
            failure = pull.failures.get(name, "")
            if failure or name in pull.serving:
                self.display.mesh(name, failure or f"serving {pull.version}")
            if failure not in ("", self._pull_failures.get(name)):
                self.display.print_line(f"{name} does not serve {pull.version}: {failure}")
            self._pull_failures[name] = failure

    async def step(
        self, batch: Batch, reports: Sequence[GroupReport], trained: dict[str, float], held: Sequence[HeldReport]
    ) -> None:
        step, summary = batch.version.step + 1, self.summary
        limits, counts = self.buffer.limits, self.buffer.counts
        now = self.activity.clock()
        seconds, self._last_step = now - self._last_step, now
        phases = self.activity.take_seconds()
        failed, summary.failed = summary.failed, []
        rollouts = [rollout for report in [*reports, *failed] for rollout in report.rollouts]
        rewards = [rollout.reward for rollout in rollouts if not rollout.error]
        filtered, summary.filtered_lengths = summary.filtered_lengths, []
        lengths = [rollout.sampled_tokens for rollout in rollouts] + filtered
        trained_lengths = [each.sampled_tokens for report in reports for each in report.rollouts if not each.error]
        sampled = sum(rollout.sampled_tokens for rollout in rollouts)
        late, timeouts = [each.sampled_tokens for each in rollouts if each.stop_reason is StopReason.TIMEOUT], {}
        if late:
            timeouts = {"rollout/timeout_length_mean": float(np.mean(late)), "rollout/timeout_length_max": max(late)}
        ages = _ages(batch, reports)
        stats = self._mesh_stats()
        reward = float(np.mean(rewards))
        truncated = float(np.mean([rollout.truncated for rollout in rollouts]))
        summary.steps = step
        summary.reward_last = reward
        summary.tokens_generated += sampled
        summary.ages.update(ages)
        if self.first_step_at is None:
            self.first_step_at = time.monotonic()
        self.metrics.write(
            step,
            {
                "rollout/reward_mean": reward,
                "rollout/reward_std": float(np.std(rewards)),
                "rollout/tokens": sampled,
                "rollout/tokens_per_second": sampled / seconds if seconds else 0.0,
                **_lengths("rollout/length", lengths),
                **_lengths("rollout/trained_length", trained_lengths),
                "rollout/length_max": max(lengths),
                "rollout/truncated_share": truncated,
                "environment/restarts": sum(report.restarts for report in [*reports, *failed]),
                "rollout/failed": sum(1 for rollout in rollouts if rollout.error),
                **_shares("rollout/failed", FailureKind, [rollout.failure for rollout in rollouts]),
                **_shares("rollout/stop", StopReason, [rollout.stop_reason for rollout in rollouts]),
                **timeouts,
                "rollout/turns_mean": float(np.mean([rollout.turn_count for rollout in rollouts])),
                "rollout/branched": sum(1 for rollout in rollouts if rollout.branch_count > 1),
                "rollout/rendered_anew": sum(rollout.rendered_anew for rollout in rollouts),
                **{f"reward/{name}": value for name, value in means(each.reward_parts for each in rollouts).items()},
                **_mean_of_engine_metrics(rollouts),
                "staleness/age_mean": float(np.mean(ages)) if ages else 0.0,
                "staleness/age_max": max(ages, default=0),
                **(_shares("staleness/share_of_age", range(limits.bound + 1), ages) if ages else {}),
                **{f"groups/{name}": counts[name] for name in ("admitted", "filtered", "failed", "active")},
                "groups/lost": summary.lost,
                "groups/samples": float(np.mean([len(report.rollouts) for report in reports])),
                "groups/equal_rewards": float(np.mean([len(report.rewards) <= 1 for report in reports])),
                "data_plane/held_samples": sum(store.samples for store in held),
                "data_plane/held_bytes": sum(store.nbytes for store in held),
                **await self._fleet_metrics(),
                **stats,
                **{f"train/{name}": value for name, value in trained.items()},
                **{f"seconds/{name}": value for name, value in phases.items()},
                "seconds/step": seconds,
            },
            groups=batch.group_ids,
        )
        for report in reports:
            self.display.add_group(report.failures)
        if late and limits.deterministic:
            ended = f"{counted(len(late), 'rollout')} of step {step} ended by the clock"
            self.display.print_line(f"{ended}: this run may not repeat bit for bit")
        numbers = {
            "reward": f"{reward:.3f}",
            "entropy": f"{trained['entropy']:.2f}",
            "truncated": f"{truncated:.0%}",
            "tokens/s": f"{sampled / seconds if seconds else 0.0:,.0f}",
        }
        if limits.bound:
            numbers["staleness"] = f"{np.mean(ages) if ages else 0.0:.1f}"
        busy = {key.removeprefix("idle/"): 1 - share for key, share in stats.items() if key.startswith("idle/")}
        self.display.step(step, numbers, phases, reward=reward, busy=busy)

    def _mesh_stats(self) -> dict[str, float]:
        """`idle/MESH` and `memory/MESH/…`, where the meshes were asked again since the last time."""
        pulses = newest_pulses(self.system) if timeline.is_on else {}
        if pulses.get("trainer") is self._pulses.get("trainer"):
            return {}
        before, self._pulses = self._pulses, pulses
        return idle_shares(before, pulses) | memory_of(pulses)

    async def _fleet_metrics(self) -> dict[str, float]:
        """The router's counters by generator; none where the router is gone, whose end is reported elsewhere."""
        try:
            fleet = await self.system.router.fleet_status()
        except TitanError:
            return {}
        metrics = {"fleet/lost": float(sum(status.state in GONE for status in fleet))}
        for status in fleet:
            if status.state not in GONE:
                requests = counted(status.in_flight, "request")
                self.display.mesh(status.name, f"{status.state} {status.version}, {requests}")
            metrics[f"fleet/{status.name}/serving"] = float(status.state.serves)
            for counter in ("load", "in_flight", "served", "failed", "aborted", "aborted_tokens"):
                metrics[f"fleet/{status.name}/{counter}"] = float(getattr(status, counter))
        return metrics


def _ages(batch: Batch, reports: Sequence[GroupReport]) -> list[int]:
    """Age in steps of every sample that has a trained token."""
    return [
        batch.version.step - PolicyVersion.decode(version).step
        for report in reports
        for version in report.samples.oldest_versions
        if version != NO_VERSION
    ]


def _shares(name: str, kinds: Iterable[object], found: Sequence[object]) -> dict[str, float]:
    return {f"{name}_{kind}": found.count(kind) / len(found) for kind in kinds}


def _lengths(name: str, tokens: Sequence[int]) -> dict[str, float]:
    median, long = np.quantile(tokens, (0.5, 0.95)).tolist()
    return {f"{name}_mean": float(np.mean(tokens)), f"{name}_p50": median, f"{name}_p95": long}


def _mean_of_engine_metrics(rollouts: Sequence[RolloutRecord]) -> dict[str, float]:
    """The engines' metrics of each rollout's completions, averaged over the rollouts that have them: engines tell of a
    step in one completion, and of lost KV where some was."""
    averages = means(rollout.metrics for rollout in rollouts)
    for rare in ("generation/preemptions", "generation/recomputed_tokens"):
        averages[rare] = sum(rollout.metrics.get(rare, 0.0) for rollout in rollouts) / len(rollouts)
    if prompt := averages.get("generation/prompt_tokens"):
        averages["generation/prefix_cache_hits"] = averages["generation/cached_tokens"] / prompt
    return averages


# What the processes of each mesh report of themselves.

Pulses = dict[str, list[Pulse]]


def idle_shares(before: Pulses, after: Pulses) -> dict[str, float]:
    """`idle/MESH`: the share of the time between two looks in which its ranks waited."""
    shares: dict[str, float] = {}
    for mesh, ranks in after.items():
        pairs = [(old.uptime, new.uptime) for old, new in zip(before.get(mesh, ()), ranks, strict=False)]
        seconds = [new.seconds - old.seconds for old, new in pairs]
        if len(pairs) == len(ranks) and min(seconds, default=0.0) > 0:
            shares[f"idle/{mesh}"] = sum(new.waited - old.waited for old, new in pairs) / sum(seconds)
    return shares


def memory_of(pulses: Pulses) -> dict[str, float]:
    """`memory/MESH/…`: bytes of all its processes together."""
    numbers = {}
    for mesh, ranks in pulses.items():
        numbers[f"memory/{mesh}/resident"] = float(sum(rank.memory.resident for rank in ranks))
        if device := sum(rank.memory.device for rank in ranks):
            numbers[f"memory/{mesh}/device"] = float(device)
    return numbers


def newest_pulses(system: System) -> Pulses:
    """What the supervisor's watch was answered last; nothing of a mesh that was replaced or does not answer."""
    meshes: dict[str, MeshClient] = {"trainer": system.trainer, "router": system.router, **system.generators()}
    meshes |= {worker.name: worker for worker in system.rollouts.workers}
    if system.gateway is not None:
        meshes["gateway"] = system.gateway
    pulses = {mesh: client.pulses for mesh, client in meshes.items() if client.pulses}
    return {"controller": [Pulse(0, memory=memory())], **pulses}
