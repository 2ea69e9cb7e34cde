"""Every number of `metrics.jsonl`, TensorBoard and W&B: its unit, its meaning, what a bad value looks like, what to do.

The report shows it beside each curve, and makes its findings of the limits. A new metric is a line where it is
measured, under the same name, and a line here. Tests hold that every key that a run writes is here, and that every
entry without a `when` is in every run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a step."""

    name: str
    """As in `metrics.jsonl`; `<…>` stands for one part of a name that differs from run to run."""
    unit: str
    """"s", "tokens", "nats", "bytes", …; "share" is 0..1; empty: a plain number."""
    meaning: str
    bad: str = ""
    """What a bad value looks like, "{limit}" being the limit; empty: none is bad by itself."""
    do: str = ""
    """What to do about a bad value."""
    when: str = ""
    """Which runs have it; empty: every run that finishes a step."""
    above: float | None = None
    """The report warns of a run whose mean over the last third of its steps is above this limit."""
    below: float | None = None
    """The same, below."""
    title: str = ""
    """Of that finding; empty: it is named by the metric."""

    @property
    def limit(self) -> float | None:
        return self.above if self.below is None else self.below

    @property
    def bad_value(self) -> str:
        """What a bad value looks like, in words."""
        return self.bad.replace("{limit}", f"{self.limit:g}") if self.limit is not None else self.bad


@cache
def metric_of(name: str) -> Metric | None:
    """The entry of a key such as `fleet/generator0/load`; None: there is none."""
    return next((each for each in METRICS if re.fullmatch(re.sub("<[^>]+>", "[^/]+", each.name), name)), None)


OFF_POLICY = "lower `loop.max_staleness` or `trainer.optimizer.lr`"
MISMATCH = (
    "the generators compute another function: compare `trainer.dtype` and `generator.dtype`, on CUDA try float32 for "
    "both first; colour rollouts of the report by logprob gap to find the tokens"
)

# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric("evaluation/exact_match", "share", "held-out prompts that a greedy answer gets exactly right",
           "flat or falling while `rollout/reward_mean` rises",
           "read held-out answers: the reward pays for something else, or the training prompts are too few",
           "lines of evaluations"),
    Metric("evaluation/reward", "", "mean reward of greedy answers to held-out prompts",
           "far below `rollout/reward_mean`",
           "more training prompts (`loop.prompts`); check that both sets are of one kind", "lines of evaluations"),
    Metric("evaluation/failed", "rollouts", "held-out rollouts that failed; the scores leave them out",
           "above 0", "the run prints the first cause; the rest is in `logs/`", "lines of evaluations"),
    Metric("rollout/reward_mean", "", "mean reward of the step's graded rollouts",
           "flat over dozens of steps",
           "read the best and the worst rollouts of a step; if `groups/equal_rewards` is near 1, make prompts easier "
           "or the reward finer; else raise `trainer.optimizer.lr` or `rollout.samples_per_group`"),
    Metric("rollout/reward_std", "", "standard deviation of the step's rewards",
           "0: nothing to learn from", "as for a flat `rollout/reward_mean`"),
    Metric("rollout/tokens", "tokens", "tokens sampled for the step's groups, failed rollouts included"),
    Metric("rollout/tokens_per_second", "tokens/s", "tokens sampled for the step's groups, by `seconds/step`", "falls",
           "find the phase of `seconds/` that grows, and see `generation/requests_running`"),
    Metric("rollout/length_mean", "tokens", "tokens that the policy sampled, mean over rollouts",
           "grows without end, or falls to a few", "let the reward pay for short answers, or for complete ones"),
    Metric("rollout/length_max", "tokens", "of the longest rollout of the step"),
    Metric("rollout/truncated_share", "share",
           "rollouts whose last turn was cut off by `rollout.sampling.max_new_tokens`",
           "above {limit}, or rising",
           "raise `rollout.sampling.max_new_tokens`, or let the reward pay for answers that end",
           above=0.1, title="Answers are cut by length"),
    Metric("rollout/failed", "rollouts", "rollouts that user code or a request failed; they are not trained",
           "above {limit} of the step's rollouts", "the run prints the first cause of a step; the rest is in `logs/`",
           above=0.05),
    Metric("rollout/stop_stop", "share", "rollouts that ended because the policy ended its only turn"),
    Metric("rollout/stop_length", "share", "rollouts whose only turn was cut off",
           "above 0.1, or rising", "see `rollout/truncated_share`"),
    Metric("rollout/stop_max_turns", "share", "rollouts that used up `rollout.max_turns`",
           "above {limit}", "raise `rollout.max_turns`, or read rollouts: the policy may call tools in a circle",
           above=0.1, title="Rollouts run out of turns"),
    Metric("rollout/stop_token_budget", "share", "rollouts that used up `rollout.max_sampled_tokens`",
           "above {limit}", "raise `rollout.max_sampled_tokens`",
           above=0.1, title="Rollouts run out of tokens"),
    Metric("rollout/stop_context_full", "share", "rollouts that the model had no room to continue",
           "above {limit}", "raise `generator.max_model_len`, or shorten what tools answer",
           above=0.1, title="Rollouts fill the model's context"),
    Metric("rollout/stop_done", "share", "rollouts that the environment ended, or whose program returned"),
    Metric("rollout/stop_error", "share", "rollouts that user code or a request failed",
           "above 0", "see `rollout/failed`"),
    Metric("rollout/stop_timeout", "share",
           "rollouts that `rollout.seconds` or `environment.step_seconds` ended; a deterministic run may not "
           "repeat them",
           "above 0: they leave their group before advantages are computed, so long answers teach less than short ones",
           "compare `rollout/timeout_length_mean` and `fleet/<generator>/aborted_tokens` with `rollout/length_mean`; "
           "find what user code waits for, or raise the limit"),
    Metric("rollout/timeout_length_mean", "tokens",
           "tokens in the finished turns of rollouts that a time-out ended, mean; the turn that was cut off is in "
           "`fleet/<generator>/aborted_tokens`",
           "far above `rollout/length_mean`", "as `rollout/stop_timeout`", "steps with such a rollout"),
    Metric("rollout/timeout_length_max", "tokens", "of the longest of them", when="as `rollout/timeout_length_mean`"),
    Metric("rollout/stop_abort", "share", "rollouts of which a request was aborted",
           "above 0", "read `logs/`"),
    Metric("rollout/turns_mean", "turns", "turns of the policy per rollout"),
    Metric("rollout/branched", "rollouts",
           "rollouts whose history was edited or forked, so that they make several samples",
           "above 0 in a task that only appends messages", "see `rollout/rendered_anew`"),
    Metric("rollout/rendered_anew", "prompts",
           "prompts that go on with a conversation, but could not be made by extending its tokens",
           "above 0: such a turn is trained as a sample of its own",
           "send the policy's answers back unchanged; some chat formats drop the reasoning of earlier turns"),
    Metric("environment/restarts", "processes",
           "processes of user code that died, or were killed at `environment.step_seconds`",
           "above 0 in many steps", "`logs/` of the rollout workers name the call; see `environment.memory_mib`"),
    Metric("reward/<function>", "", "mean value of one reward function, without its weight",
           "the one that is cheap to get rises, the one that you want does not", "change the weights in the rubric",
           "tasks whose rubric has several functions, or names its only one"),
    Metric("generation/prompt_tokens", "tokens", "tokens of a turn's prompt, mean over rollouts"),
    Metric("generation/cached_tokens", "tokens", "of a turn's prompt, in the prefix cache; mean over rollouts"),
    Metric("generation/prefix_cache_hits", "share", "cached by all prompt tokens",
           "near 0, although turns go on with a conversation, or prompts longer than `generator.block_size` are shared",
           "keep conversations on one generator (`router.strategy`), raise `generator.kv_cache_bytes`, or set "
           "`generator.keep_prefix_cache`"),
    Metric("generation/seconds_waiting", "s",
           "of a turn, outside of the engine: at the router while no generator may serve it, queued, on the way",
           "longer than `generation/seconds_in_engine`",
           "`router.weight_sync` hot_swap, or a larger `loop.max_staleness`, if `seconds/pull` is as long; else more "
           "generators"),
    Metric("generation/seconds_queued", "s", "of a turn, from its arrival at a generator to its engine",
           "as long as a step", "more generators, or smaller `generator.burst_steps`"),
    Metric("generation/seconds_to_first_token", "s", "from the engine to the first token",
           "much longer than one decoding step: requests wait for a place in the batch, or prompts are long",
           "raise `generator.max_num_seqs` or `generator.kv_cache_bytes`; more generators"),
    Metric("generation/seconds_in_engine", "s", "from the engine to the last token"),
    Metric("generation/requests_running", "requests", "batch of the engine in steps that end answers",
           "far below `generator.max_num_seqs`, while rollouts are slow",
           "a larger `loop.max_staleness` or `loop.groups_per_step`; fewer generators"),
    Metric("generation/requests_waiting", "requests", "requests that waited for a place in that batch",
           "above 0 in most steps",
           "raise `generator.max_num_seqs`, or `generator.kv_cache_bytes` if `generation/kv_use` is near 1"),
    Metric("generation/kv_use", "share", "of the KV cache that is in use before such steps",
           "above {limit}", "raise `generator.kv_cache_bytes` (on CUDA `generator.gpu_memory_utilization`)",
           above=0.9, title="The KV cache is full"),
    Metric("generation/preemptions", "",
           "how often an answer lost its KV because the cache was full, mean over rollouts",
           "above {limit}", "raise `generator.kv_cache_bytes`, or lower `generator.max_num_seqs`",
           above=0.1, title="Answers lose their KV"),
    Metric("generation/recomputed_tokens", "tokens",
           "of a turn whose KV new weights took, mean over rollouts: they are computed again, equal prefixes once",
           "as many as `generation/prompt_tokens` and the answer, while `seconds/rollout` is long",
           "`generator.keep_prefix_cache`, `router.weight_sync` drain, or shorter answers"),
    Metric("generation/segments", "", "parts of an answer that was interrupted and went on, mean over such rollouts",
           when="steps with an interrupted answer: a slow drain, a lost generator"),
    Metric("generation/attempts", "", "attempts that an interrupted answer took, mean over such rollouts",
           "above {limit}",
           "see `fleet/<generator>/failed`, and raise `router.drain_seconds` if drains cut answers off",
           "as `generation/segments`", above=2),
    Metric("staleness/age_mean", "steps",
           "optimizer steps between the oldest token's policy and the one that is trained, mean over samples",
           "at `loop.max_staleness` while `train/effective_sample_size` falls",
           "lower `loop.max_staleness`; give generators more, the trainer less"),
    Metric("staleness/age_max", "steps", "of the oldest sample; the run holds it below a proven bound"),
    Metric("staleness/share_of_age_<n>", "share", "samples of that age, from 0 to the bound",
           when="up to the run's bound"),
    Metric("groups/admitted", "groups", "groups handed out since the run began"),
    Metric("groups/filtered", "groups", "groups that `loop.filter` has refused since the run began",
           "rises by more than a step's groups per step",
           "the filter throws most work away: make prompts fit the policy's strength"),
    Metric("groups/failed", "groups", "groups since the run began of which no rollout could be trained",
           "rises", "see `rollout/failed`"),
    Metric("groups/equal_rewards", "share",
           "trained groups whose rollouts all got the same reward: they teach nothing but the entropy bonus",
           "above {limit}",
           "near reward 0: easier prompts or a finer reward; near the top: harder prompts; or refuse them "
           "(`loop.filter`)", above=0.8, title="Groups teach nothing"),
    Metric("groups/active", "groups", "groups that are handed out and not trained yet"),
    Metric("groups/lost", "groups",
           "groups since the run began that a process took with it and that were played again",
           "rises", "find what kills workers: memory, `environment.memory_mib`, the host's logs"),
    Metric("data_plane/held_samples", "samples",
           "samples that wait in the stores of the rollout workers after the step",
           "grows with every step", "a bug: please report it"),
    Metric("data_plane/held_bytes", "bytes", "their size",
           "near the room in `/dev/shm`", "lower `loop.max_staleness`"),
    Metric("idle/<mesh>", "share",
           "time in which the processes of a mesh waited for others, since the line before that has it",
           "above {limit} for the trainer or a generator", "`titan-rl report RUN` says for whom they waited",
           "with `logging.spans`, about once a second", above=0.5),
    Metric("memory/<mesh>/resident", "bytes",
           "of all its processes in RAM; a page that several processes share is a part of each (PSS)",
           "grows with every step, or nears the host's RAM",
           "a leak, often in user code: `environment.memory_mib` bounds it; fewer `rollout.workers`",
           "with `logging.spans`, every half minute or so"),
    Metric("memory/<mesh>/device", "bytes", "that torch holds on the devices of its processes",
           "near the device's memory",
           "lower `trainer.max_tokens_per_microbatch` or `generator.gpu_memory_utilization`",
           "on CUDA, about once a second"),
    Metric("fleet/lost", "generators", "generators that are dead and awaited",
           "above 0 for long", "`titan-rl fleet RUN` says what holds the replacement up"),
    Metric("fleet/<generator>/serving", "0 or 1", "whether it takes requests at the end of the step",
           "0 in most steps",
           "`titan-rl fleet RUN`; compare `seconds/pull` with `seconds/step`, try `router.weight_sync` hot_swap"),
    Metric("fleet/<generator>/load", "tokens", "estimated tokens of its requests at the end of the step",
           "far from that of the others", "another `router.strategy`"),
    Metric("fleet/<generator>/in_flight", "requests", "requests that it runs at the end of the step"),
    Metric("fleet/<generator>/served", "requests", "requests that it has answered since it was started"),
    Metric("fleet/<generator>/failed", "requests", "attempts that ended in an error since it was started",
           "rises", "its log in `logs/` names the cause"),
    Metric("fleet/<generator>/aborted", "requests",
           "answers that it was sampling when they were given up, since it was started: a rollout or a request ran out "
           "of time, a program hung up",
           "rises", "see `rollout/stop_timeout` and `router.request_seconds`"),
    Metric("fleet/<generator>/aborted_tokens", "tokens", "of these answers; none of them is trained",
           "by `fleet/<generator>/aborted` far above `rollout/length_mean`: long answers are dropped",
           "raise `rollout.seconds` or `router.request_seconds`"),
    Metric("train/loss", "", "mean loss per trained token; with GRPO its size says little",
           "jumps by orders of magnitude", "lower `trainer.optimizer.lr`"),
    Metric("train/grad_norm", "", "norm of the whole gradient before clipping",
           "rises steadily, or spikes to many times `trainer.optimizer.max_grad_norm`",
           "lower `trainer.optimizer.lr`; look at `train/weight_max` and at the rollouts of the step"),
    Metric("train/lr", "", "learning rate of the step"),
    Metric("train/entropy", "nats", "mean entropy of the distributions that trained tokens were drawn from",
           "falls to near 0 while the reward is low: the policy has settled too soon; or rises without end",
           "set `entropy_bonus` in `trainer.loss.kwargs`, lower `trainer.optimizer.lr`, or start earlier and stop "
           "sooner"),
    Metric("train/kl_k1", "nats", "KL(behaviour ‖ current policy), estimator k1: unbiased, of either sign",
           "as `train/kl_k3`", OFF_POLICY),
    Metric("train/kl_k3", "nats", "KL(behaviour ‖ current policy), estimator k3: never negative; 0 on-policy",
           "above {limit}", OFF_POLICY, above=0.1),
    Metric("train/reference_kl_k1", "nats",
           "KL(current ‖ reference policy), estimator k1: unbiased on-policy, of either sign",
           "as `train/reference_kl_k3`", "as `train/reference_kl_k3`", "`trainer.kl.coefficient` above 0"),
    Metric("train/reference_kl_k3", "nats", "KL(current ‖ reference policy), estimator k3: never negative",
           "grows without end while the held-out score stands still", "raise `trainer.kl.coefficient`",
           "`trainer.kl.coefficient` above 0"),
    Metric("train/weight_mean", "",
           "mean importance weight, current / behaviour probability of trained tokens; 1 in expectation",
           "outside of 0.9..1.1", OFF_POLICY),
    Metric("train/weight_max", "", "the largest importance weight",
           "above {limit}", OFF_POLICY, above=100),
    Metric("train/effective_sample_size", "share", "share of the tokens that counts after weighting: 1 on-policy",
           "below {limit}", OFF_POLICY, below=0.5, title="Samples are far off-policy"),
    Metric("train/clip_share", "share", "trained tokens whose gradient the loss clipped or bounded",
           "above {limit}", OFF_POLICY, "the bundled losses", above=0.2),
    Metric("train/masked_share", "share",
           "trained tokens of samples outside of the band (`sequence_low`, `sequence_high` in "
           "`trainer.loss.kwargs`)",
           "above {limit}", "a wider band, or a lower `loop.max_staleness`", "the bundled losses", above=0.1),
    Metric("train/entropy_bonus", "weight", "weight of the entropy in the loss, which falls as `entropy_decay` says"),
    Metric("train/on_policy_tokens", "tokens", "trained tokens that this very version sampled"),
    Metric("train/logprob_difference_mean", "nats",
           "mean absolute difference of the logprobs of trainer and generator on on-policy tokens; should be 0",
           "above 1e-5 in float32, 0.02 in bfloat16, or rising",
           MISMATCH),
    Metric("train/logprob_difference_max", "nats", "the largest such difference",
           "above {limit}", MISMATCH, above=1),
    Metric("train/logprob_outside_share", "share", "on-policy tokens whose probability ratio is outside of 0.9..1.1",
           "above {limit}", MISMATCH, above=0.05),
    Metric("train/logprob_alarm", "0 or 1",
           "whether the mismatch is beyond `trainer.logprob_alarm.mean` or `trainer.logprob_alarm.outside_share`",
           "1", MISMATCH),
    Metric("train/trained_tokens", "tokens", "tokens with a gradient"),
    Metric("train/tokens", "tokens", "tokens that were computed, prompts and padding included"),
    Metric("train/imbalance", "", "the fullest data-parallel rank's tokens over their mean",
           "above {limit}: ranks wait for each other", "more groups per step (`loop.groups_per_step`), or fewer ranks",
           above=1.3, title="Trainer ranks wait for each other"),
    Metric("train/seconds", "s", "the step on the slowest rank"),
    Metric("seconds/step", "s", "from the end of the step before; the phases overlap, so they may sum to more",
           "grows", "find the phase below that grows with it"),
    Metric("seconds/rollout", "s", "in which at least one group was played",
           "as long as the step, while `seconds/train` is short: generators are the bottleneck",
           "more generators, or a larger `loop.max_staleness`", "steps in which groups were played"),
    Metric("seconds/train", "s", "in which the trainer computed",
           "as long as the step: the trainer is the bottleneck",
           "more trainer ranks (`trainer.data_parallel`), larger `trainer.max_tokens_per_microbatch`"),
    Metric("seconds/publish", "s", "in which the trainer wrote the weights for the generators",
           "above a tenth of the step", "more trainer ranks write in parallel",
           "steps in which weights were published"),
    Metric("seconds/pull", "s", "in which generators drained, loaded and verified weights",
           "above a tenth of the step", "`router.weight_sync` hot_swap, or `router.max_syncing`",
           "steps in which weights were pulled"),
    Metric("seconds/evaluate", "s", "in which held-out prompts were answered",
           "most of the run", "fewer `evaluation.prompts`, a larger `evaluation.every`", "steps beside an evaluation"),
    Metric("seconds/checkpoint", "s", "in which training waited for the copy of a checkpoint",
           "above a tenth of the step", "a larger `checkpoint.every`", "steps after which a checkpoint was cut"),
    Metric("seconds/warm_up", "s", "of the supervised steps before RL",
           when="the first step after a warm-up"),
    Metric("seconds/restore", "s", "in which a resumed run read its checkpoint",
           when="the first step after a resume"),
)
# fmt: on
