"""Configs of the policy and its trainer. `policy/` turns them into torchtitan's."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from titan_rl.bounds import Count, CountOrZero, NotNegative, Positive, Seed, Share
from titan_rl.errors import ConfigError

_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""torch refuses matrix products without the first. With the others NCCL adds in one order."""

KLEstimator = Literal["k1", "k2", "k3", "k3_corrected"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The matrices of a layer, as Hugging Face names them. Embedding and head have no adapters."""


@dataclass(kw_only=True, slots=True)
class TinyPolicyConfig:
    """A randomly initialised policy that is made on the spot, in Hugging Face format."""

    architecture: str = "qwen3"
    """Whose layers it has: "qwen3", "qwen3_moe", "llama3", or a family of your own, as `policy.architecture`."""
    tokenizer: Literal["symbols", "chat"] = "symbols"
    """"symbols": one token per character of `symbols`; nothing else can be written. "chat": Qwen3's chat format and its
    special tokens, over single bytes: any text can be written, one token per byte, so `max_length` must be larger."""
    symbols: str = "0123456789="
    """One token per character, after `<pad>` (0) and `<eos>` (1). Tokenizer "chat" does not read it."""
    special_tokens: tuple[str, ...] = ()
    """Further single tokens of several characters, such as `<tool>`."""
    dim: Count = 64
    layers: Count = 2
    heads: Count = 4
    kv_heads: Count = 2
    head_dim: Count = 32
    """The CPU attention of vLLM has kernels for 32, 64, 80, 96, 112, 128, 160, 192, 224 and 256, not for 16."""
    ffn: Count = 192
    max_length: Count = 64
    """Positions the policy has, prompt and completion together."""
    tied_embeddings: bool = True
    seed: Seed | None = None
    """Seed of the initial weights, normal around 0; None: the run's seed."""


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """Which weights training starts from. Exactly one of `path` and `tiny`."""

    path: str = ""
    """Directory of a checkpoint in Hugging Face format (config.json, *.safetensors): of Qwen3, Qwen3 MoE, Llama 3, or
    the family that `policy.architecture` names."""
    architecture: str = ""
    """A family of your own, that checkpoints of its `model_type` have: `file.py:Name`."""
    tiny: TinyPolicyConfig | None = None
    """Make a tiny policy instead of loading one."""

    def __post_init__(self) -> None:
        if bool(self.path) == (self.tiny is not None):
            raise ConfigError("policy: set exactly one of policy.path and policy.tiny")

    @property
    def family(self) -> str:
        """Besides those that are bundled; any name where there is none."""
        return self.architecture if self.tiny is None else self.tiny.architecture


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule (torchtitan's)."""

    lr: Positive = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    warmup_steps: CountOrZero = 0
    """Steps over which lr rises linearly from near 0."""
    decay_ratio: Share = 0.0
    """Share of the run's steps, at its end, over which lr falls linearly to `min_lr_factor`; 0: constant."""
    min_lr_factor: Share = 0.0
    kl_band: NotNegative = 0.0
    """Nats (`train/kl_k3`) between the policy and those that sampled a step: beyond it the step's lr is divided by as
    much, before the step is made. It shows in `train/lr`. Samples of staleness 0 are always within. 0: never."""


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """Which loss, and its keyword arguments."""

    name: str = "grpo"
    """A name that `titan-rl algorithms` lists, `pkg.mod:function` or `file.py:function`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the function (of grpo clip_low, clip_high), and of every loss aggregation, entropy_bonus,
    entropy_decay, sequence_low, sequence_high."""
    seconds: Positive = 60.0
    """Of a function of your own, not a bundled one: a call that has not returned after so long ends the run."""


@dataclass(kw_only=True, slots=True)
class KLConfig:
    """A term of the loss that keeps the policy near a frozen one."""

    coefficient: NotNegative = 0.0
    """Weight of the KL estimate per trained token. 0: no reference model exists, and none is paid for; above 0 every
    step runs a second forward pass, and every trainer rank holds its shards twice."""
    estimator: KLEstimator = "k3"
    """See `titan_rl.policy.losses`. k3 is GRPO's; k1 and k2 have the KL's own gradient on policy, k3_corrected has it
    for old samples too."""
    in_reward: bool = False
    """The estimates of a token and of later ones of its sample are taken from its advantage, instead of a term in the
    loss: PPO's rewards. At the weights before the batch, so that one more forward pass of both policies comes first."""
    teacher: str = ""
    """Directory of a checkpoint of any size over the same tokens, to keep near instead: on-policy distillation
    (`titan-rl algorithms distillation`). Empty: the policy as it was before the first RL step."""

    def __post_init__(self) -> None:
        if (self.teacher or self.in_reward) and not self.coefficient:
            raise ConfigError(
                "trainer.kl.coefficient is 0, and without it teacher and in_reward do nothing: set it too"
            )


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """A value head beside the policy's, from whose values advantages are made (`titan-rl algorithms ppo`). It is
    trained with the policy and kept in checkpoints; generators never see it."""

    coefficient: NotNegative = 0.0
    """Weight of the value loss per trained token; 0: there is no critic. Above 0, one more forward pass comes before a
    batch's first optimizer step, and the value loss trains the policy's layers too."""
    lr: Positive = 1e-3
    """Of the head. The policy's schedule does not change it."""
    clip: NotNegative = 0.2
    """How far a value may move from that before the batch until its loss stands still; 0: as far as it likes."""
    discount: Share = 1.0
    """Of rewards, per trained token."""
    gae_lambda: Share = 0.95
    """Near 1: advantages are what came of it, noisy; near 0: what the values say, biased."""


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685) beside frozen weights, named as in PEFT. Only they are trained, published
    and kept in checkpoints. A good learning rate is about ten times that of all weights."""

    r: CountOrZero = 0
    """Rank of the adapters: a weight [out, in] is changed by B [out, r] times A [r, in]. 0: all weights are trained."""
    lora_alpha: Positive = 16.0
    """The change is scaled by `lora_alpha` / `r`."""
    target_modules: tuple[LoraTarget, ...] = get_args(LoraTarget)
    """Matrices that get an adapter, in every layer."""

    def __post_init__(self) -> None:
        if not self.target_modules or ("k_proj" in self.target_modules) != ("v_proj" in self.target_modules):
            raise ConfigError("trainer.lora.target_modules: at least one, and k_proj and v_proj together or neither")

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.r


@dataclass(kw_only=True, slots=True)
class LogprobAlarmConfig:
    """What to do when trainer and generators disagree about the tokens that this very version sampled, where their
    logprobs should be equal. Looked at in every step, before the weights change: in its first mini-batch, if it has
    several."""

    mean: NotNegative = 0.05
    """Nats. A larger mean absolute difference is warned about, and reported as `logprob_alarm`. float32 engines stay
    below 1e-6, bfloat16 ones near 0.01; 0 turns it off."""
    outside_share: NotNegative = 0.1
    """The same for the share of tokens whose probability ratio is outside [0.9, 1.1]; 0 turns it off."""
    stop_mean: NotNegative = 0.0
    """Nats. A larger mean absolute difference ends the run, the weights as they were; 0: never."""


@dataclass(kw_only=True, slots=True)
class WarmupConfig:
    """Supervised steps on the environment's demonstrations, before the first RL step. They are no policy versions."""

    steps: CountOrZero = 0
    """0: none."""
    batch: Count = 128
    """Demonstrations of a step; demonstration number i is used once, in step i // batch."""
    enough_loss: NotNegative = 0.0
    """Nats per token, or per pair: it ends after ten steps in a row below this. 0: never for this."""
    flat_steps: CountOrZero = 0
    """It ends when the mean loss of the last so many steps, or of the last quarter if that is more, is hardly below
    that of as many before, and far below the first. Demonstrations some of which are wrong come to no `enough_loss`.
    0: never for this."""
    dpo_beta: NotNegative = 0.0
    """Above 0: demonstrations are pairs of an answer and a rejected one, learned by direct preference optimization with
    this beta (0.1 is usual) against the policy as it began. 0: cross entropy of the answers."""
    lr: Positive = 3e-3
    """Of AdamW, at its peak. The optimizer's state is thrown away when RL begins."""
    lr_warmup_steps: int = 20
    """Steps over which lr rises linearly; after them it falls linearly to a tenth at the last step."""

    def __post_init__(self) -> None:
        if self.dpo_beta and not self.steps:
            raise ConfigError("trainer.warmup.dpo_beta is not used while trainer.warmup.steps is 0: set them too")
        if self.steps and not 0 <= self.lr_warmup_steps <= self.steps:
            raise ConfigError(
                f"trainer.warmup.lr_warmup_steps ({self.lr_warmup_steps}) must be between 0 and trainer.warmup.steps "
                f"({self.steps})"
            )


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The trainer mesh: `data_parallel * tensor_parallel` ranks."""

    data_parallel: Count = 1
    """Ranks with samples of their own; FSDP2 shards the state over them. A single rank that computes in float32 has no
    use for FSDP, and runs without it."""
    replicas: Count = 1
    """Copies of the state that the data-parallel ranks hold together (HSDP): each shards it over `data_parallel` /
    `replicas` neighbours, so that weights travel within a host and only gradients between hosts."""
    tensor_parallel: Count = 1
    sequence_parallel: bool = False
    """Tensor-parallel ranks also share what they would all hold between their layers: less memory for activations."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype (FSDP mixed precision); master weights and optimizer state are always float32. On CUDA, attention
    in float32 holds a document's tokens x tokens scores of all heads: for comparisons, not for long samples."""
    max_tokens_per_microbatch: Count = 4096
    """Token budget of one packed micro-batch of one rank; bounds activation memory. No sample may be longer."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes. "full": everything within a layer, about a third more compute and the least
    memory. "selective": all but attention and every second matrix product."""
    compile: bool = False
    """torch.compile of each layer. Minutes at the start; then fewer launches, which bound small policies. Only on CUDA
    in bfloat16."""
    deterministic: bool = False
    """The trainer's part of the run's `deterministic`, which turns it on: torch refuses operations that it knows to
    differ from run to run (on CPU there are none in a step). The same batches in the same order then give bitwise the
    same weights. Samples in another order, or another number of ranks, change their last bits."""
    parity: Literal["auto", "bitwise"] = "auto"
    """"bitwise": on CPU, compute the logprob of a token that this very version sampled as the generators did, to the
    last bit, and end the run at the first that differs. Generators are then deterministic (see `generator`), and a step
    takes longer (`policy/README.md`). "auto": trainer and generators round each in their own way."""
    replay_routes: bool = True
    """Of a mixture of experts: compute every token with the experts that its generator chose (arXiv:2510.11370), which
    travel with the sample; the router learns from the shares that it gives them. A token is left out of the loss where
    they are not known (`train/unrouted_tokens`). `False`: with those that the trainer's router would choose, and 2
    bytes a token, layer and expert less to send."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    epochs: Count = 1
    """How often a batch is trained before its policy version is published. With several optimizer steps a batch, ratios
    leave 1 without any staleness, and one more forward pass comes before the first."""
    minibatches: Count = 1
    """Optimizer steps of an epoch: each trains other groups, always the same ones of a batch, in the same order. A
    batch of fewer groups with trained tokens makes as many as these."""
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    logprob_alarm: LogprobAlarmConfig = field(default_factory=LogprobAlarmConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)

    def __post_init__(self) -> None:
        if self.data_parallel % self.replicas:
            raise ConfigError(f"trainer.replicas ({self.replicas}) must divide data_parallel ({self.data_parallel})")

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel

    def environment(self, device: str) -> dict[str, str]:
        """Variables for every rank, apart from the rendezvous (RANK, WORLD_SIZE, …)."""
        if device == "cpu":
            return {}
        # Rows whose lengths always differ leave no holes in memory.
        return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | (_DETERMINISTIC if self.deterministic else {})
