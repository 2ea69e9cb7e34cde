"""Configs of environments and rollout workers."""

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_rl.bounds import Count, CountOrZero, NotNegative, Port, Positive, PositiveShare, Share, TwoOrMore
from titan_rl.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """Which task, and its keyword arguments."""

    name: str = "copy"
    """Short name (`titan-rl recipes` lists the bundled tasks), `pkg.mod:Class` or `file.py:Class`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments of the environment class."""
    step_seconds: Positive = 30.0
    """Longest time user code may take for one step of a rollout, or to make an example; past it the process is killed
    and the rollout reported as failed. Calls that take long run side by side, in up to 4 processes of a worker."""
    grade_seconds: Positive = 30.0
    """The same for its reward, for a group reward, and for the function that gives a group credit."""
    program_seconds: Positive = 30.0
    """The same for a program that plays: between two calls, with none open."""
    start_seconds: Positive = 300.0
    """Longest time the import and the construction of the environment may take, data sets included."""
    variables: tuple[str, ...] = ()
    """Environment variables that user code sees besides those that programs commonly need (listed in
    `isolation/process_io.py`): the key of a grader's API, for example. Secrets are not passed on unless named here."""
    memory_mib: CountOrZero = 4096
    """Memory that one process of user code, and each process that it starts, may allocate beyond what the environment
    takes once it is made. A call that needs more fails, and only its rollout with it; a program gets a MemoryError. The
    default holds a large test run, and not all of a host's memory. 0: no bound. Mapped files and shared memory are not
    counted."""


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How the policy samples while training. `top_p`, `top_k` and `min_p` leave out unlikely tokens: generators then
    record which tokens were possible at each place, and the trainer's logprobs and entropies are of those alone. A
    token that was the only possible one is not trained. Evaluations leave out none. Refused on CUDA, where vLLM does
    not say what was possible."""

    temperature: Positive = 1.0
    max_new_tokens: Count = 6
    """Per turn."""
    top_p: PositiveShare = 1.0
    """The likeliest tokens that have this much of the probability together; 1: all. Less makes answers more regular,
    leaves less to learn from, and costs a sort of all logits per token."""
    top_k: CountOrZero = 0
    """So many of the likeliest tokens; 0: all."""
    min_p: Share = 0.0
    """Tokens with at least this share of the likeliest one's probability; 0: all."""

    @property
    def truncation(self) -> dict[str, Any]:
        """Of the settings that leave out tokens, those that do."""
        settings = {"top_p": (self.top_p, 1.0), "top_k": (self.top_k, 0), "min_p": (self.min_p, 0.0)}
        return {name: value for name, (value, off) in settings.items() if value != off}


@dataclass(kw_only=True, slots=True)
class AgentsConfig:
    """The gateway inside a run, which a task that defines `play` starts: an OpenAI-compatible server through which
    programs play rollouts, each with a key of its own."""

    host: str = "127.0.0.1"
    """Address to listen on, and that programs are told. Other machines may reach it: every call needs the key of an
    open rollout."""
    port: Port = 0
    """0: any free port."""
    at_once: Count = 64
    """Programs that one worker runs at a time; the other rollouts wait for their turn, before their time begins. More
    keep the engines busier; each costs the memory of a process, and those that compute take the cores from engines."""

    def __post_init__(self) -> None:
        if self.host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"rollout.agents.host {self.host!r} is no address to connect to: name one of this host's")


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    """How rewards become advantages."""

    name: str = "grpo"
    """A name that `titan-rl algorithms` lists, `pkg.mod:function` or `file.py:function`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the function."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Rollout workers: how many, and what one group is."""

    workers: Count = 1
    """Processes that run environments and graders."""
    samples_per_group: TwoOrMore = 8
    """Rollouts of one prompt; advantages are taken within the group."""
    most_samples: CountOrZero = 0
    """Groups are twice as large, up to so many, after a step in which more than half of them taught nothing by equal
    rewards and were not solved; those that `loop.filter` refused do not count. 0: they stay as they are."""
    rollouter: str = "titan_rl.rollout.rollouter:Rollouter"
    """Class that plays one rollout: `pkg.mod:Class` or `file.py:Class`."""
    renderer: str = "auto"
    """"symbols" (one token per symbol, no template), "chat" (the `renderers` library, by the model's type), the name of
    one of that library's renderers, or "auto": chat when the tokenizer has a chat template, else symbols."""
    renderer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of a chat renderer, such as `enable_thinking`."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    max_turns: Count = 8
    """A conversation is cut after this many policy turns; tool calls of the last one are not made."""
    max_sampled_tokens: CountOrZero = 0
    """Tokens that the policy may sample in all turns of a rollout together; then it is cut. 0: no bound but
    `sampling.max_new_tokens` in each turn."""
    seconds: NotNegative = 0.0
    """Longest time one rollout may take, waiting for engines included; then it is stopped and reported as failed. 0: no
    bound of its own; user code has those of `environment`, and engines are watched for progress."""
    on_error: Literal["train_rest", "fail_group"] = "train_rest"
    """What becomes of a group in which a rollout failed: "train_rest" trains the others, compared among themselves;
    "fail_group" trains none, and the next prompt's group takes its place."""
    failure_share: Share = 0.5
    """The run stops, and names the cause, when failures of one kind (`types.FailureKind`) are more than this share of
    its newest 256 rollouts of training, of at least 64. 1.0: it never does."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    agents: AgentsConfig = field(default_factory=AgentsConfig)
