"""The sections of a run's config and of an evaluation's.

Every field has a docstring, from which `make docs` generates `docs/config.md`. A setting that TRL
or PEFT has, too, has their name.
"""

from operator import attrgetter
from os.path import expanduser
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from stapo_lite.config.presets import EVAL_PRESETS, PRESETS, Presets

UserPath = Annotated[str, Field(min_length=1), AfterValidator(expanduser)]
"""A path, or a name on the Hub."""
Names = Annotated[list[str], Field(min_length=1)]
Url = Annotated[str, Field(pattern="^https?://"), AfterValidator(lambda url: url.rstrip("/"))]
Share = Annotated[float, Field(gt=0, le=1)]
IN_PYTHON = "train_dataset"
"""`data.source` of a run whose rows exist only in Python."""
BENCHMARK_NAMES = ["aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"]
# YAML reads on and off as true and false.
_ON_OFF = BeforeValidator(lambda value: {"True": "on", "False": "off"}.get(str(value), value))
_ALL_LINEAR = BeforeValidator(lambda value: [value] if value == "all-linear" else value)
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _tracker_list(value: Any) -> Any:
    """One tracker needs no list, as in TRL, whose "none" is an empty one."""
    trackers = [value] if isinstance(value, str) else value
    return [] if trackers == ["none"] else trackers


Conflicts = list[tuple[Any, str]]
"""Conditions that must not hold, each with its message: the keys and the fix."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, docstrings document the fields."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # This copies nested sections, which presets fill in place.
        revalidate_instances="always",
        validate_default=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_no_text(cls, value: Any) -> Any:
        """Refuse the text "None", Python's spelling of YAML's null."""
        if value == "None":
            raise PydanticCustomError("none", "for no value write null")
        return value

    def conflicts(self) -> Conflicts:
        """The combinations of values that are errors."""
        return []

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for holds, message in self.conflicts():
            if holds:
                raise ValueError(message)
        return self


class Lora(Section):
    """The adapter (PEFT `LoraConfig` names)."""

    adapter: UserPath | None = None
    """Start from this adapter (folder, or name on the Hub) of the same rank, scale and layers. The
    KL term then refers to this adapter."""
    r: int = Field(16, ge=1, le=512)
    """Rank; vLLM serves ranks up to 512."""
    lora_alpha: PositiveInt = 32
    """Scale of the adapter's output: `lora_alpha / r`."""
    use_rslora: bool = False
    """Scale by `lora_alpha / sqrt(r)` instead."""
    target_modules: Annotated[Names, _ALL_LINEAR] = ["all-linear"]
    """Names of linear layers that get an adapter, or `all-linear`: all of the decoder."""


class Prompting(Section):
    """How a problem becomes a prompt."""

    system_prompt: str | None = None
    """System message of prompts without one."""
    prompt_suffix: str = ""
    """Text appended to the last user message."""
    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template, such as `enable_thinking`."""
    max_prompt_length: PositiveInt = 1024
    """Longest prompt, in tokens."""

    def conflicts(self) -> Conflicts:
        return [
            (
                self.system_prompt is not None and not self.apply_chat_template,
                "data.system_prompt needs data.apply_chat_template=true: put it into the prompts "
                "instead",
            )
        ]


class Data(Prompting):
    """Prompts."""

    source: UserPath
    """File, folder of `save_to_disk`, dataset on the Hub, or `package.module:function`, which
    returns the same dictionaries at each call (docs/data.md#rows)."""
    subset: str | None = None
    """Configuration of a Hub dataset."""
    split: str = "train"
    """Split of a Hub dataset."""
    prompt_column: str = "prompt"
    """Column of texts or lists of messages."""
    answer_column: str = "answer"
    """Column of `math`'s references; `a.b` is key `b` of column `a`."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than `max_prompt_length`, which otherwise are an error."""


class Reward(Section):
    """Scoring of completions."""

    functions: list[str] = ["math"]
    """`math` (docs/grading.md), or `package.module:function` (docs/data.md#a-reward-function)."""
    weights: list[float] | None = None
    """Weights of the functions, by default 1 each."""
    correct: float = 1.0
    """`math`: reward of a right answer."""
    incorrect: float = -1.0
    """`math`: reward of a wrong one."""
    truncated_is_incorrect: bool = True
    """`math`: a completion that was cut off is wrong, even with a `\\boxed{}`."""
    overlong_penalty: NonNegativeFloat = 0.0
    """DAPO's penalty for a completion of full length."""
    overlong_buffer: Share = 0.2
    """Part of `max_completion_length`, at its end, over which the penalty grows from 0."""
    function_timeout: float = Field(300.0, gt=0, le=1e9)
    """Seconds that one call of your reward function may take."""
    probe: Annotated[Literal["auto", "on", "off"], _ON_OFF] = "auto"
    """After the second step, call the functions once more, to find why a run cannot learn
    (docs/faults.md#symptoms). `auto`: unless one was passed to `Trainer`, which may cost money or
    keep a state, and not for completions of several turns."""

    def conflicts(self) -> Conflicts:
        names = self.functions
        weights = self.weights
        return [
            (
                len(set(names)) < len(names),
                f"reward.functions={names}: a name occurs twice; list a function once, with a "
                "weight (reward.weights), and give two functions two names (`__name__`)",
            ),
            (
                weights is not None and len(weights) != len(names),
                f"reward.weights={weights} for reward.functions={names}: give one weight per "
                "function",
            ),
        ]


class Engine(Section):
    """The engine that samples completions."""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """`auto`: vLLM if it is installed and has a device, else transformers' `generate`."""
    max_completion_length: PositiveInt = 2048
    """Longest completion, in tokens."""
    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1)
    """vLLM's share of the card's memory; by default what the trainer leaves (servers: vLLM's own
    default)."""
    max_num_seqs: PositiveInt = 128
    """Completions sampled at a time."""
    quantization: str | None = None
    """vLLM's `quantization`: `bitsandbytes` with an `nf4` trainer, `fp8`, ...; null for a
    checkpoint that is quantised."""
    vllm: dict[str, Any] = {}
    """Other engine arguments of vLLM, such as `kv_cache_dtype`. On a CPU `kv_cache_memory_bytes` is
    1 GiB by default."""


class Rollout(Engine):
    """Sampling of completion groups."""

    function: str | None = None
    """`package.module:coroutine` for several turns (docs/turns.md)."""
    environment: str | None = None
    """`package.module:Class`: an environment to play in (docs/turns.md#environments)."""
    num_generations: int = Field(8, ge=2)
    """Completions per prompt (G)."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling and of the trained distribution."""
    skip_special_tokens: bool | None = None
    """Leave special tokens, tags among them, out of the text that rewards see
    (docs/data.md#a-reward-function)."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal (DAPO)."""
    max_sampling_rounds: PositiveInt = 10
    """`dynamic_sampling`: most rounds in a step, which then trains on the groups that it has."""
    engine: Literal["auto", "vllm", "server", "transformers"] = "auto"  # type: ignore[assignment]
    """`auto`: vLLM in the trainer's process if it is installed and has a device, else transformers'
    `generate`; `server`: vLLM elsewhere (docs/scaling.md)."""
    servers: Annotated[list[Url], Field(min_length=1)] = ["http://127.0.0.1:8000"]
    """`server`: addresses that `stapo serve` has shown."""
    max_lag: NonNegativeInt = 0
    """`server`: steps that may be sampled ahead of the trainer."""
    share_base: bool = True
    """Train on vLLM's weights (docs/how.md#one-base-in-memory) if `quantization` and
    `rollout.quantization` agree; else there are two copies."""
    self_check: bool = True
    """Before the first step, compare engine and trainer with a random adapter (docs/faults.md)."""

    @property
    def several_turns(self) -> bool:
        """Whether a completion may have several turns."""
        return bool(self.function or self.environment)

    def conflicts(self) -> Conflicts:
        parallel = self.vllm.keys() & {"tensor_parallel_size", "data_parallel_size"}
        return [
            (
                self.engine != "server" and parallel,
                "rollout.vllm.tensor_parallel_size and data_parallel_size need "
                "rollout.engine=server (docs/scaling.md)",
            ),
            (
                self.engine != "server" and self.max_lag,
                "rollout.max_lag needs rollout.engine=server (docs/scaling.md)",
            ),
            (
                self.several_turns and self.max_lag,
                "rollout.function and rollout.environment need rollout.max_lag=0: turns cannot be "
                "sampled ahead",
            ),
            (
                self.function and self.environment,
                "rollout.function and rollout.environment: set one of them",
            ),
        ]


class S2T(Section):
    """Silencing Spurious Tokens, the keep-mask of STAPO."""

    preset: Literal[*PRESETS["objective.s2t.preset"]] = "paper"  # type: ignore[valid-type]
    """Sets the keys below: the revised paper, its first version, the authors' article (also
    `objective.entropy_coef`), or an ablation."""
    enabled: bool = True
    """Take spurious tokens out of the loss, or only count them."""
    tau_p: Share = 0.002
    """Candidates have a positive advantage and a probability below this."""
    quantile: float = Field(0.75, ge=0, le=1)
    """tau_h is this quantile of the entropy over `population`."""
    population: Literal["candidates", "all"] = "candidates"
    """The candidates, or all tokens of the mini-batch."""
    silence: Literal["low-entropy", "high-entropy", "random", "all"] = "low-entropy"
    """Candidates to silence: those below tau_h, as many of highest entropy, as many at random, or
    all."""
    statistics: Literal["current", "old"] = "old"
    """Policy that gives probability and entropy. `old`: the one before the step; `current`: the
    present one (the paper's Algorithm 1), which takes a pass in each mini-batch, not only in the
    step's first."""


class Stare(Section):
    """Amplification of surprising tokens (arXiv 2606.19236, STARE): those of lowest probability."""

    weight: PositiveFloat = 1.0
    """Factor on their loss if the advantage is positive (paper: 1.1)."""
    negative_weight: NonNegativeFloat = 1.0
    """Factor on their loss if the advantage is negative (second variant: 0.9)."""
    share: Share = 0.1
    """Part of the tokens with an advantage of either sign that counts as surprising."""
    target_entropy: NonNegativeFloat = 0.3
    """The weights apply while the mini-batch's mean entropy in nats is below this."""

    @property
    def enabled(self) -> bool:
        """Whether any weight differs from 1."""
        return (self.weight, self.negative_weight) != (1, 1)


class Objective(Section):
    """Advantages, the loss of a token, and the tokens that it is summed over."""

    scale_rewards: Literal["group", "batch", "mean", "none", "each"] = "group"
    """Divide advantages by the standard deviation of the group or of the step, by the group's mean
    (MaxRL, for rewards from 0 to 1), or not (Dr. GRPO). `each`: those of each reward function by
    the group's, and their weighted sum by the step's (GDPO)."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off out of the loss. Their rewards still count in their
    groups."""
    token_loss: Literal["clip", "cispo", "gspo", "dppo", "sapo"] = "clip"
    """How a token's loss is bounded by its ratio to the old policy (docs/methods.md)."""
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """Mean over tokens (DAPO); over sequences of their means (GRPO); sum / (completions x
    `max_completion_length`) (Dr. GRPO)."""
    epsilon: float = Field(0.2, ge=0, le=1)
    """Lower clip of the ratio: 1 - epsilon (`dppo`: pi_old - epsilon)."""
    epsilon_high: NonNegativeFloat = 0.28
    """Upper clip: 1 + epsilon_high (pi_old + epsilon_high)."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the base, or from `lora.adapter`."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus. With it the LM head is slower."""
    top_entropy_quantile: Share = 1.0
    """Train only on this part of the tokens, those of highest entropy."""
    renormalize: bool = True
    """Divide by the tokens that the masks keep (STAPO), or by all (20-Entropy)."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: the trainer's probabilities before the step, or the engine's. The
    latter can save a pass."""
    sampler_correction: Annotated[
        Literal["token-truncate", "icepop", "sequence-mask", "off"], _ON_OFF
    ] = "token-truncate"
    """With `old_logprobs=trainer`, a weight on each token's loss, from c = the trainer's
    probability before the step / the engine's. `token-truncate`: min(c, `sampler_cap`); `icepop`:
    c, or 0 outside of 1 / cap to cap; `sequence-mask`: the product of the sequence's c, or 0 above
    the cap."""
    sampler_cap: float = Field(2.0, ge=1)
    """Largest weight of `sampler_correction`."""
    teacher_adapter: UserPath | None = None
    """Adapter of the same rank, scale and layers on the same base
    (docs/methods.md#distillation)."""
    teacher_server: Url | None = None
    """Address of a vLLM server whose model has the student's vocabulary."""
    teacher_weight: PositiveFloat = 1.0
    """Weight of the teacher's part of the advantage."""
    s2t: S2T = S2T()
    stare: Stare = Stare()

    @property
    def distills(self) -> bool:
        """Whether a teacher scores each token."""
        return bool(self.teacher_adapter or self.teacher_server)


class Train(Section):
    """Optimisation."""

    max_steps: PositiveInt = 200
    """Steps: rollouts and their updates."""
    batch_size: PositiveInt = 64
    """Prompts per step, over all processes."""
    mini_batch_size: PositiveInt = 16
    """Prompts per update; must divide `batch_size`."""
    max_tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Most tokens in one pass of a process, padding included; a longer sequence gets a pass of its
    own. `auto`: what fits the card (CPU: 16,384). Lowered when memory runs out."""
    learning_rate: PositiveFloat = 1e-5
    """Learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 10
    """Steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: `linear` and `cosine` fall to 0 at `max_steps`."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass. `auto`: if they do not fit the card, and always
    on a CPU."""
    offload_activations: bool | Literal["auto"] = "auto"
    """Keep inputs of checkpointed layers in host memory. `auto`: if nothing else fits."""
    lm_head_memory_gb: PositiveFloat = 0.25
    """Workspace of the LM head, in GiB."""


class Log(Section):
    """Logging and checkpoints."""

    report_to: Annotated[
        list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(_tracker_list)
    ] = []
    """Trackers besides `metrics.jsonl`."""
    project: str = Field("stapo_lite", pattern=r"^\w[\w .-]*$")
    """Project name in trackers; with TensorBoard a folder."""
    log_completions_steps: NonNegativeInt = 10
    """Print two completions every N steps; 0: never."""
    completions: NonNegativeInt = 32
    """Completions of each step that go to `completions.jsonl` and to trackers."""
    save_steps: NonNegativeInt = 50
    """Checkpoint every N steps and at the end; 0: only at the end."""
    save_total_limit: PositiveInt = 2
    """Checkpoints that are kept, the newest."""
    hub_model_id: str | None = None
    """Hub repository that gets the adapter at every checkpoint."""
    hub_private_repo: bool = False
    """Make this repository private."""
    audit_tokens: NonNegativeInt = 32
    """Candidates of S2T that each step logs for `stapo audit`, with as many other tokens."""


class Evaluation(Section):
    """Held-out rows and benchmarks during training, with completions of at most
    `rollout.max_completion_length` tokens."""

    steps: NonNegativeInt = 0
    """Evaluate before the first step, every N steps and at the end; 0: never."""
    source: UserPath | None = None
    """Held-out rows like `data.source`, judged by the run's rewards."""
    subset: str | None = None
    """Configuration of a Hub dataset; by default that of `data` if the dataset is the same."""
    split: str = "test"
    """Split of a Hub dataset."""
    limit: PositiveInt | None = None
    """First N rows of `source` and problems of each benchmark."""
    benchmarks: list[str] | None = None
    """As in an evaluation (below); by default aime24, aime25 and amc23, or none with a `source`."""
    best: str | None = None
    """Keep the best adapter in `best/`: by `reward` or `reward/FUNCTION` (of `source`), by
    `average`, or by a benchmark's name."""
    num_samples: PositiveInt | None = None
    """Samples per problem; by default the benchmark's, and one per row of `source`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Share = 1.0
    """Nucleus sampling; 1: from all tokens."""


class Preset(Section):
    """A section with presets, which fill fields that are not given. Filled fields stay out of
    `model_fields_set`."""

    _presets: ClassVar[Presets] = {}

    def model_post_init(self, context: Any) -> None:
        for preset, table in reversed(self._presets.items()):  # so that the first one wins
            for key, value in table[attrgetter(preset)(self)].items():
                path, _, name = key.rpartition(".")
                section = attrgetter(path)(self)
                if name not in section.model_fields_set:
                    section.__dict__[name] = value  # bypasses `frozen` and `model_fields_set`


class Config(Preset):
    """A whole run."""

    algorithm: Literal[*PRESETS["algorithm"]] = "stapo"  # type: ignore[valid-type]
    """Sets keys that you do not give (docs/methods.md)."""
    model: UserPath
    """Base model: a folder, or a name on the Hub."""
    output_dir: UserPath
    """The run folder (docs/index.md#the-run-folder); new, unless you resume."""
    dtype: Dtype = "auto"
    """Type of the base and of the forward pass. `auto`: bfloat16, or float16 on cards without units
    for bfloat16; on a CPU the faster one of bfloat16 and float32, timed at each start."""
    quantization: Literal["nf4"] | None = None
    """`nf4`: a 4-bit base (QLoRA); vLLM gets the same by `rollout.quantization=bitsandbytes`. Not
    tried on a card."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of every random draw."""
    stop_on: list[str] = []
    """Symptoms (docs/faults.md#symptoms) that end the run. Others are only printed."""
    lora: Lora = Lora()
    data: Data
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    objective: Objective = Objective()
    train: Train = Train()
    evaluation: Evaluation = Evaluation()
    log: Log = Log()

    _presets: ClassVar[Presets] = PRESETS

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt plus the longest completion."""
        return self.data.max_prompt_length + self.rollout.max_completion_length

    @property
    def same_quantization(self) -> bool:
        """Whether trainer and vLLM have the base in the same format."""
        return self.rollout.quantization == ("bitsandbytes" if self.quantization else None)

    @property
    def may_share_base(self) -> bool:
        """Whether the trainer and a vLLM in its process may share the base's weights."""
        rollout = self.rollout
        return rollout.share_base and rollout.engine in ("auto", "vllm") and self.same_quantization

    def conflicts(self) -> Conflicts:
        objective = self.objective
        rollout = self.rollout
        train = self.train
        evaluation = self.evaluation
        corrected = objective.old_logprobs == "rollout" or objective.sampler_correction != "off"
        return [
            (
                train.batch_size % train.mini_batch_size,
                f"train.batch_size={train.batch_size} is not divisible by train.mini_batch_size="
                f"{train.mini_batch_size}",
            ),
            (
                objective.teacher_server and rollout.temperature != 1,
                f"rollout.temperature={rollout.temperature}: a server scores at a temperature of "
                "1; set it to 1",
            ),
            (
                not objective.distills
                and (self.algorithm == "distill" or not self.reward.functions)
                and not rollout.environment,
                "algorithm=distill, and reward.functions=[], need a teacher: set "
                "objective.teacher_adapter or objective.teacher_server",
            ),
            (
                rollout.several_turns and evaluation.source and evaluation.top_p < 1,
                f"evaluation.top_p={evaluation.top_p}: rollout.function makes the completions of "
                "evaluation.source, as in training; set it to 1",
            ),
            (
                (evaluation.source or evaluation.best) and not evaluation.steps,
                "evaluation.source and evaluation.best need evaluation.steps: set it, such as to "
                "20",
            ),
            (
                rollout.max_lag and not corrected,
                f"rollout.max_lag={rollout.max_lag} needs a correction for older adapters: set "
                "objective.sampler_correction=token-truncate, or objective.old_logprobs=rollout",
            ),
        ]


class EvalEngine(Engine):
    """Sampling."""

    max_completion_length: PositiveInt = 20480
    """Longest completion, in tokens."""
    gpu_memory_utilization: float = Field(0.9, gt=0, lt=1)
    """vLLM's share of the card's memory."""
    num_samples: PositiveInt | None = None
    """Samples per problem; by default the protocol's (docs/evaluation.md#protocol), 1 for files."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Share = 1.0
    """Nucleus sampling; 1: from all tokens."""


class EvalPrompting(Prompting):
    """How a problem becomes a prompt."""

    prompt_suffix: str = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    """Text appended to the last user message."""
    max_prompt_length: PositiveInt = 2048
    """Longest prompt, in tokens."""


class EvalConfig(Preset):
    """An evaluation: `stapo evaluate`."""

    model: UserPath
    """The adapter's base, or a merged model: a folder, or a name on the Hub."""
    adapter: UserPath | None = None
    """Folder with an adapter in PEFT's format."""
    output_dir: UserPath
    """Folder for samples, verdicts and results."""
    benchmarks: Names = BENCHMARK_NAMES
    """Names of these six, or `.jsonl` files with the keys `problem` and `answer`
    (docs/evaluation.md#protocol)."""
    limit: PositiveInt | None = None
    """First N problems of each benchmark."""
    decoding: Literal["training-aligned", "justrl"] = "training-aligned"
    """Temperature and top-p, in the paper's two settings: 1.0 and 1.0 as in training, or 0.7 and
    0.9 as in JustRL."""
    dtype: Dtype = "auto"
    """As in a run."""
    seed: int = Field(0, ge=0, lt=2**31)
    """A sample's own seed is derived from this one, the problem and the sample's number."""
    data: EvalPrompting = EvalPrompting()
    rollout: EvalEngine = EvalEngine()

    _presets: ClassVar[Presets] = EVAL_PRESETS
