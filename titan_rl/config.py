"""The run config: it composes the component configs and checks what no component can check alone.

Where fields belong to a component, its config lives beside that component, unless it is one field. Whoever makes a
`RunConfig`, by whatever means, gets one whose values have the types and bounds of their fields.
"""

from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import ClassVar, Literal

from titan_rl.bounds import Count, CountOrZero, Positive, Seed, Share, TwoOrMore
from titan_rl.errors import ConfigError
from titan_rl.gateway.config import GatewayConfig, is_loopback
from titan_rl.generation.config import GeneratorConfig
from titan_rl.overrides import check
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig, TrainerConfig
from titan_rl.rollout.config import EnvironmentConfig, RolloutConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.scheduling.config import StalenessLimits

CLASS_SETTINGS = (
    "environment.name",
    "rollout.rollouter",
    "rollout.advantage.name",
    "trainer.loss.name",
    "loop.filter",
    "generator.engine",
    "router.strategy",
)
"""Settings that may name a class or function of the user: `pkg.mod:Name` or `file.py:Name`."""

DATA_FILES = tuple(f"environment.kwargs.{name}" for name in ("train_file", "test_file", "path", "test_path"))
"""Arguments of environments that name files: a relative name starts where other settings' file names start."""

LONGEST_NAME = 200
"""Bytes of a run's name: most file systems take 255, of which the time and the process id need some."""


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    """Hosts, devices and threads of the meshes, and what happens when one is lost."""

    hosts: tuple[str, ...] = ()
    """ADDRESS:PORT of each worker (`titan-rl worker`) to use besides this host. This host is `host0`; they are `host1`,
    `host2`, … in this order. torchrun sets it."""
    address: str = ""
    """IP address of this host at which other hosts reach it; empty: the one that leads to the first of `hosts`. Where
    it is given, hosts can join a run that starts on this host alone (`titan-rl fleet RUN add`)."""
    trusted_network: bool = False
    """With other hosts, ports are opened that run any code for whoever reaches them. Say `true` if only people whom you
    trust can. Not needed with TLS, unless the trainer spans several hosts."""
    trainer: tuple[str, ...] = ()
    """Hosts that share the trainer's ranks evenly; empty: as few as have room. All must see `logging.directory`."""
    generators: tuple[str, ...] = ()
    """Hosts of the generators, spares too. Each generator is on one of them; empty: any host."""
    rollouts: tuple[str, ...] = ()
    """Hosts of the rollout workers; empty: any host."""
    router: str = "host0"
    """Host of the router."""
    gateway: str = "host0"
    """Host of the gateway."""
    rdma: Literal["auto", "off"] = "auto"
    """`auto`: where two hosts have RDMA, weights go by it, unless a first read from a host fails: then that host's go
    by TCP, and the run says so. `off`: all by TCP."""
    host_seconds: Positive = 10.0
    """A host that answers nothing for so long is lost, with everything on it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda when this host has a CUDA device, else cpu."""
    ranks_per_device: Count = 1
    """Ranks of different meshes that may share a CUDA device, so that one device is enough for trainer and generators.
    With more than 1, `generator.kv_cache_bytes` says what a generator takes besides its weights."""
    threads: Count = 1
    """OpenMP threads per process on CPU. More than one on contended cores costs far more than it gives. On CUDA a
    trainer rank has its device's share of the host's cores."""
    start_seconds: Positive = 300.0
    """Bound on the start of a mesh, model load included; six times as long on CUDA, where vLLM compiles kernels and
    captures graphs first. A process that is not born within Monarch's 30 s is started again."""
    step_seconds: Positive = 1800.0
    """Longest time any single call to a mesh may take before the run ends with the name of that call. Requests and
    rollouts are no such calls: see `rollout.seconds`."""
    hang_seconds: Positive = 120.0
    """A process that makes no progress for so long is taken for dead: it answers nothing, or a generator's engine step
    does not end, or ranks of the trainer stand still in a step."""
    spares: CountOrZero = 0
    """Generators besides `generator.count` that are built and wait without weights, each with devices of its own. One
    takes a dead one's place at once."""
    restarts: CountOrZero = 5
    """Starts in a row of one mesh that may fail, with pauses of up to 60 s. Then a generator is left out, and any
    other mesh ends the run."""
    least_generators: Count = 1
    """Generators are left out, or leave with their host, only while so many are left."""
    too_few_generators: Literal["end", "wait"] = "end"
    """When fewer would be left: end the run, or go on starting them for ever."""

    def __post_init__(self) -> None:
        self.hosts = tuple(host for several in self.hosts for host in several.split(",") if host)
        if twice := {host for host in self.hosts if self.hosts.count(host) > 1}:
            raise ConfigError(f"placement.hosts: {', '.join(sorted(twice))} twice: one worker is one host")
        addresses = [*(host.rpartition(":")[0] for host in self.hosts), *([self.address] if self.address else [])]
        if self.hosts and 0 < sum(map(is_loopback, addresses)) < len(addresses):
            raise ConfigError(
                f"placement.hosts: {', '.join(self.hosts)}: the hosts must reach each other, and an address 127.… "
                "leads every host to itself: give each worker the address under which the others reach it"
            )
        for host in self.hosts:
            address, _, port = host.rpartition(":")
            if not address or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ConfigError(f"placement.hosts: {host} is not ADDRESS:PORT")

    @property
    def several_hosts(self) -> bool:
        """Whether there may be other hosts than this one."""
        return bool(self.hosts or self.address)

    def untrusted(self) -> tuple[str, ...]:
        """Addresses of the run on networks which nobody said to trust."""
        own = (f"{self.address}:0",) if self.address else ()
        addresses = (host.rpartition(":")[0] for host in (*own, *self.hosts))
        return tuple(each for each in addresses if not (self.trusted_network or is_loopback(each)))


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    """Length and rhythm of training, and how far generation may run ahead of it."""

    steps: CountOrZero = 150
    """Optimizer steps of the run. 0: the warm-up is all, which is supervised fine-tuning."""
    groups_per_step: Count = 32
    """Prompt groups (P) that every step trains, no more and no fewer."""
    max_staleness: CountOrZero = 0
    """Steps (S) that generation may run ahead of training: (S + 1)·P groups are in flight. 0: synchronous, every sample
    is on-policy. More overlaps generation with training; gains end at about 2."""
    window: Count = 1
    """How far (W) a batch looks past the oldest group that is not finished. 1: strictly in the order of the prompts.
    More lets finished groups overtake a slow one, for up to ⌈(W - 1)/P⌉ further steps of staleness."""
    prompts: CountOrZero = 0
    """Distinct prompts in the training stream before it starts over; 0: the environment's own number."""
    filter: str = ""
    """Groups that are not to be trained: "no_variance" (all rewards equal), or `pkg.mod:function` or `file.py:function`
    that is given a `GroupReport` and returns why to refuse it, or "". Each is replaced by the next prompt's group.
    Empty: every group is trained."""
    untrainable_batches: Count = 20
    """A run ends with the reason when so many batches' worth of groups in a row teach nothing: all rewards equal,
    filtered, or failed. It has failed, unless every one of them was solved (see `evaluation.target_exact_match`): then
    nothing is left to learn, and it ends well."""
    watchdog_seconds: Positive = 120.0
    """When nothing has moved for so long, the run says which part it waits for; again after every such time."""


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out evaluation: greedy decoding, before, during and after training. A rollout that user code failed is
    neither right nor wrong: the score is over the others, and how many failed is shown beside it."""

    every: CountOrZero = 50
    """Evaluate after every so many steps; 0: only before and after."""
    prompts: Count = 1000
    """Held-out prompts; fewer when the environment has fewer."""
    target_exact_match: Share = 0.0
    """The run fails (exit code 1) when the last evaluation's exact match is below this; 0: no target. A rollout is an
    exact match by the score `exact_match`, if the rubric has one; else if the reward function of the greatest weight
    gives at least 1, without its weight. A rubric that trains group rewards alone has to give it to have a target."""


@dataclass(kw_only=True, slots=True)
class DataPlaneConfig:
    """Samples stay in the rollout worker that made them until they are trained."""

    store_mib: Count = 1024
    """Shared memory that one rollout worker may fill with samples; about 60 thousand tokens per MiB. A run whose
    samples do not fit ends with an error that says so."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    """How new weights travel from the trainer mesh to the generators, whom a publication tells where it is."""

    max_live: TwoOrMore = 2
    """Publications that may exist at once: the one that is served, the one that is being pulled, and those that an
    evaluation keeps. A trainer that wants one more waits, and the watchdog says for whom."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints from which `--resume` goes on. Every run also writes one when it ends, however it ends."""

    every: CountOrZero = 20
    """Write one after every so many steps, beside training; 0: only at the end."""
    keep: CountOrZero = 2
    """Newest checkpoints that are kept; 0: write none. Each holds the float32 weights and AdamW's two moments."""
    in_memory: bool = True
    """After every step each trainer rank also copies its state into shared memory. A rank that dies then costs the step
    that was under way; without a copy, all steps since the newest checkpoint. It takes 24 bytes per parameter in
    /dev/shm, and 4 more for the reference of a KL term; a run that has no room says so and goes on without."""


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """What is written where, and how."""

    directory: str = "runs"
    """Every run makes a directory of its own below this one, `NAME-TIME-PID`."""
    name: str = ""
    """Of the run; `--name` is the same. Empty: that of the recipe, or of the file that holds it."""
    tensorboard: bool = True
    wandb_project: str = ""
    """Also log to this Weights & Biases project; empty: never contact it."""
    rollouts: CountOrZero = 1
    """So many of the best, of the worst and of random rollouts of every step are recorded in `rollouts.jsonl`, message
    by message and token by token, a whole group of each twentieth, and a few of each evaluation. 0: none. A recorded
    token takes about 70 bytes."""
    progress: bool = True
    """Live display in a terminal; plain lines elsewhere."""
    spans: bool = True
    """Write what every process does and for whom it waits into `spans/`, for `titan-rl report` and Perfetto. Takes
    about 1 % of the processor time of a tiny policy's steps, and less of longer ones."""
    save_final: bool = True
    """Write the newest weights as a Hugging Face checkpoint when the run ends, also when it fails or is stopped."""

    def __post_init__(self) -> None:
        if self.name.startswith(".") or not all(c.isprintable() and c != "/" for c in self.name):
            raise ConfigError(
                f"logging.name {self.name!r} cannot name a directory: leave out '/', control characters and a first '.'"
            )
        if len(self.name.encode()) > LONGEST_NAME:
            raise ConfigError(f"logging.name has {len(self.name.encode())} bytes, and {LONGEST_NAME} are possible")


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything one run needs. Recipes in `config_registry` return one; TOML and the command line override it."""

    serving: ClassVar[bool] = False
    """Whether a checkpoint is served: there is a gateway, and there are neither trainer nor rollout workers."""

    recipe: str = ""
    """Name of the recipe this config came from."""
    seed: Seed = 0
    """Decides prompts, sampling and initial weights."""
    deterministic: bool = False
    """Make the run a function of its config and seed, bit for bit, at any `loop.max_staleness`: the same weights again
    from the same seed, and from any `generator.count`, `tensor_parallel` of 1 or 2, batch sizes, prefix caching,
    routing, delays and arrival times. An asynchronous run then samples each group whole by one
    version and trains groups in order: `router.weight_sync` is "drain", `loop.window` 1, and more versions stay
    published. `False`: logprobs differ in their last bits with the batch that a request happens to meet. On CPU
    sampling is 2–37 % slower; on CUDA runs were not equal. What else cannot be reproduced, and what was measured:
    `scheduling/README.md`."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(tiny=TinyPolicyConfig()))
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    data_plane: DataPlaneConfig = field(default_factory=DataPlaneConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)

    @property
    def user_modules(self) -> tuple[str, ...]:
        """Files and modules with the user's code. Every process imports them first."""
        named = (self.recipe, self.policy.family, *attrgetter(*CLASS_SETTINGS)(self))
        modules = dict.fromkeys(name.rpartition(":")[0] for name in named)
        return tuple(module for module in modules if module and module.split(".")[0] != "titan_rl")

    def staleness_limits(self) -> StalenessLimits:
        """How groups are scheduled. A deterministic run trains them in order, whatever `loop.window` says."""
        loop = self.loop
        return StalenessLimits(
            groups_per_step=loop.groups_per_step,
            max_staleness=loop.max_staleness,
            window=1 if self.deterministic else loop.window,
            deterministic=self.deterministic,
        )

    def router_settings(self) -> RouterConfig:
        """`router`, with what the whole run decides for it: an exact version cannot change under a completion."""
        return replace(self.router, weight_sync="drain") if self.staleness_limits().exact_versions else self.router

    def gateway_settings(self) -> GatewayConfig:
        """Of the gateway that programs play rollouts through."""
        agents = self.rollout.agents
        return GatewayConfig(host=agents.host, port=agents.port, rollout_keys=True)

    def weights_settings(self) -> WeightsConfig:
        """`weights`, with what the whole run decides for it: room for every version that may be needed again, for the
        one that is evaluated and for the next."""
        needed = self.loop.max_staleness + 3 if self.staleness_limits().exact_versions else 0
        return replace(self.weights, max_live=max(self.weights.max_live, needed))

    def generator_settings(self) -> GeneratorConfig:
        """`generator`, with what the whole run decides for it."""
        shares = self.generator.shares_device or self.placement.ranks_per_device > 1
        deterministic = self.deterministic or self.generator.deterministic or self.trainer.parity == "bitwise"
        return replace(self.generator, deterministic=deterministic, shares_device=shares)

    def generator_names(self) -> list[str]:
        """The generators that the run starts with; the last are spares."""
        return [f"generator{number}" for number in range(self.generator.count + self.placement.spares)]

    def trainer_settings(self) -> TrainerConfig:
        """`trainer`, with what the whole run decides for it."""
        return replace(self.trainer, deterministic=self.deterministic or self.trainer.deterministic)

    def __post_init__(self) -> None:
        check(self)
        tiny = self.policy.tiny
        self.generator_settings()  # refuses what does not fit together
        if tiny is not None and self.generator.max_model_len > tiny.max_length:
            raise ConfigError(
                f"generator.max_model_len ({self.generator.max_model_len}) is more than policy.tiny.max_length "
                f"({tiny.max_length}) positions"
            )
        if self.rollout.sampling.max_new_tokens >= self.generator.max_model_len:
            raise ConfigError(
                f"rollout.sampling.max_new_tokens ({self.rollout.sampling.max_new_tokens}) leaves no room for a prompt "
                f"in generator.max_model_len ({self.generator.max_model_len})"
            )
        if self.trainer.max_tokens_per_microbatch < self.generator.max_model_len:
            raise ConfigError(
                f"trainer.max_tokens_per_microbatch ({self.trainer.max_tokens_per_microbatch}) must hold one whole "
                f"sample of generator.max_model_len ({self.generator.max_model_len}) tokens"
            )


@dataclass(kw_only=True, slots=True)
class ServeConfig(RunConfig):
    """What of a run a service uses: policy, generators, router, renderer, placement; and its gateway."""

    serving: ClassVar[bool] = True
    gateway: GatewayConfig = field(default_factory=GatewayConfig)

    @classmethod
    def of(cls, config: RunConfig, gateway: GatewayConfig) -> "ServeConfig":
        return cls(**{each.name: getattr(config, each.name) for each in fields(RunConfig)}, gateway=gateway)

    def gateway_settings(self) -> GatewayConfig:
        return self.gateway

    def router_settings(self) -> RouterConfig:
        """There is only one version, so a completion whose generator died can start over and gives the same tokens.
        Without resuming, penalties and min_tokens can be allowed."""
        return replace(RunConfig.router_settings(self), resume=False)
