"""The run's configuration: one typed tree, read from YAML and `key.sub=value` overrides.

Every field carries its own docstring; `docs/config.md` is generated from them
(`python -m stapo_lite.config > docs/config.md`). Names are TRL's and PEFT's where they have one.
"""

import copy
import difflib
import logging
import os
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

Symptom = Literal[
    "entropy_collapse", "entropy_explosion", "no_signal", "reward_stuck", "silenced_share", "sampler_gap", "ratio"
]
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _path(text: str) -> str:
    """A path that the system accepts, or a name on the Hub."""
    if "\0" in text or any(len(part.encode(errors="replace")) > 255 for part in text.split("/")):
        raise PydanticCustomError("path", "no file can be called so")
    return os.path.expanduser(text)


UserPath = Annotated[str, Field(min_length=1), AfterValidator(_path)]
BENCHMARK_NAMES = ["aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"]
OptionalPath = Annotated[str | None, AfterValidator(lambda path: path and _path(path))]
PROJECTIONS: list[Projection] = list(get_args(Projection))


class InputError(Exception):
    """A mistake in the user's input. Its message is one line naming the key or file and the fix;
    the command-line programs print it and exit with status 2."""


class RunError(Exception):
    """A run that cannot go on through no mistake in its input. Its message is one line; the programs print it and exit
    with status 1."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an InputError or RunError as one line and exit with its status."""
    logging.basicConfig(format="%(levelname)s: %(message)s")  # of the warnings
    try:
        yield
    except (InputError, RunError) as error:
        rank = int(os.environ.get("RANK", "0"))
        print(f"error{f' (process {rank})' if rank else ''}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, fields are documented by their docstrings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)
Presets = dict[str, dict[str, dict[str, Any]]]  # key of the preset -> its value -> fields that it sets


class Lora(Section):
    """The adapter (PEFT `LoraConfig` names)."""

    r: int = Field(16, ge=1, le=512)
    """Rank. vLLM serves ranks up to 512."""
    lora_alpha: int = Field(32, gt=0)
    """Scale of the adapter's output: `lora_alpha / r`."""
    target_modules: list[Projection] = Field(PROJECTIONS, min_length=1)
    """Linear layers that get an adapter. The LM head stays frozen: `lm_head.py` relies on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the trained parameters. Bfloat16 saves a little memory and drops updates smaller than
    a 256th of a value, which at usual learning rates are most."""


class Prompting(Section):
    """How a problem becomes a prompt."""

    system_prompt: str | None = None
    """System message put before each prompt (with the chat template only)."""
    prompt_suffix: str = ""
    """Text appended to the last user message."""
    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template. A prompt that ends in an assistant message
    is continued, as in TRL."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template, such as `enable_thinking`."""
    max_prompt_length: int = Field(1024, ge=1)
    """Longest prompt, in tokens."""

    @model_validator(mode="after")
    def _system_prompts_need_the_template(self):
        if self.system_prompt is not None and not self.apply_chat_template:
            raise ValueError("data.system_prompt needs data.apply_chat_template=true: put it into the prompts instead")
        return self


class Data(Prompting):
    """Prompts."""

    source: UserPath = "arithmetic"
    """`arithmetic` (generated sums), a `.jsonl` or `.parquet` file, or a dataset name on the Hub."""
    subset: str | None = None
    """Configuration name of a Hub dataset."""
    split: str = "train"
    """Split of a Hub dataset."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of `{role, content}` messages."""
    answer_column: str = "answer"
    """Column with the reference answer, which the built-in rewards need."""
    drop_contaminated: bool = False
    """Leave out rows that overlap a problem of `benchmarks`: that hold 60 % or more of its 8-grams."""
    benchmarks: list[str] = BENCHMARK_NAMES
    """`drop_contaminated` only: as in an evaluation (below)."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than `max_prompt_length` instead of stopping with an error."""
    arithmetic_max_operand: int = Field(50, ge=1)
    """`arithmetic` only: operands are drawn from 1 to this number."""


class Reward(Section):
    """Scoring of completions."""

    functions: list[str] = Field(["math"], min_length=1)
    """`math` (the final answer, docs/grading.md), `arithmetic` (the last integer must equal the
    answer), or `package.module:function` with TRL's signature, in a notebook `__main__:function`."""
    weights: list[float] | None = None
    """Weight of each function; all 1 by default."""
    correct: float = 1.0
    """Value the built-in rewards give a right answer."""
    incorrect: float = -1.0
    """Value the built-in rewards give a wrong one: -1 as in DAPO, or 0."""
    truncated_is_incorrect: bool = True
    """`math`: a completion that was cut off at `max_completion_length` is wrong, whatever box it has; else an early box
    would earn all that follows it."""
    overlong_penalty: float = Field(0.0, ge=0)
    """Soft overlong punishment (DAPO): taken off the reward of a completion of full length; 0 for none."""
    overlong_buffer: float = Field(0.2, gt=0, le=1)
    """The penalty grows linearly over this last share of `max_completion_length` (DAPO: 4,096 of 20,480)."""
    timeout: float = Field(5.0, gt=0, le=1e6)
    """Seconds of wall-clock time after which `math` kills the worker and scores the answer wrong."""
    num_workers: int = Field(2, ge=1)
    """Worker processes of `math`."""
    function_timeout: float = Field(300.0, gt=0, le=1e6)
    """Seconds that one call of your own function may take. It runs in a process of its own, which is then killed."""
    function_memory_gb: float | None = Field(None, gt=0)
    """Memory of that process, in GiB, above which it is killed; by default half of the machine's."""
    max_failures: int = Field(3, ge=1)
    """Batches in a row that a function of your own may fail to judge (each is tried twice) before the run ends."""

    @model_validator(mode="after")
    def _one_weight_per_function(self):
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} entries for {len(self.functions)} "
                "reward.functions: give one weight per function"
            )
        return self


class Engine(Section):
    """The engine that samples completions."""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """`auto` takes vLLM where it is installed, else transformers' `generate`."""
    max_completion_length: int = Field(2048, ge=1)
    """Longest completion, in tokens."""
    gpu_memory_utilization: float = Field(0.45, gt=0, lt=1)
    """vLLM on a GPU: share of the card's memory it may take."""
    kv_cache_gb: float = Field(1.0, gt=0)
    """vLLM on a CPU: size of the KV cache in GiB."""
    max_num_seqs: int = Field(128, ge=1)
    """Completions sampled at the same time."""
    max_restarts: int = Field(3, ge=0)
    """Times that a vLLM which fails while it samples a batch is started anew, or that a request to a server is
    repeated, before the run ends."""
    quantization: str | None = None
    """vLLM's `quantization` of what it serves: `bitsandbytes` for the 4-bit weights of an `nf4` trainer, `fp8`, ...;
    a quantised checkpoint needs none."""


class Rollout(Engine):
    """Sampling of completion groups."""

    num_generations: int = Field(8, ge=2)
    """Completions per prompt (the group size G)."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; training uses the distribution at this temperature too. There is no
    top-p, top-k or repetition penalty: each would bias the sampled log-probabilities."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and draw further prompts until the batch is full (DAPO)."""
    max_sampling_rounds: int = Field(10, ge=1)
    """`dynamic_sampling` only: after this many rounds the step goes on with the groups it has."""
    engine: Literal["auto", "vllm", "server", "transformers"] = "auto"  # type: ignore[assignment]
    """`auto` takes vLLM in the trainer's process where it is installed, else transformers' `generate`; `server` is a
    vLLM of its own, on another card or machine (docs/scaling.md)."""
    servers: list[str] = Field(["http://127.0.0.1:8000"], min_length=1)
    """`server` only: addresses of vLLM servers, which share the work."""
    server_timeout: float = Field(600.0, gt=0, le=1e6)
    """`server` only: seconds to wait for them to come up."""
    shared_folder: OptionalPath = None
    """`server` only: a folder that trainer and servers see under the same path, to hand adapters over; without one
    they are uploaded, to servers that `python -m stapo_lite.rollout.serve` started."""
    tensor_parallel_size: int = Field(1, ge=1)
    """`server` only: cards that one server is spread over."""
    max_lag: int = Field(0, ge=0)
    """`server` only: how many steps ahead of the trainer completions may be sampled, by an adapter that is as much
    older; 0 is synchronous. `objective.sampler_correction` accounts for it."""
    model: OptionalPath = None
    """vLLM: serve this checkpoint of the same model, quantised to fp8, AWQ or GPTQ, in place of `model`. How far
    that is from the trainer's policy is logged as `sampler_gap_*`, and corrected by `objective.sampler_correction`."""
    sleep_level: Literal[0, 1, 2] = 1
    """vLLM on a GPU, while the trainer updates: 0 keeps its memory, 1 moves its weights to the host, 2 drops them and
    reads them from the disk again (vLLM 0.28 or newer, not with `bitsandbytes`). The adapter outlives both."""

    @model_validator(mode="after")
    def _only_a_server(self):
        for key, default in (("max_lag", 0), ("tensor_parallel_size", 1)):
            if self.engine != "server" and getattr(self, key) != default:
                raise ValueError(f"rollout.{key}={getattr(self, key)} needs rollout.engine=server (docs/scaling.md)")
        return self

    @model_validator(mode="after")
    def _can_wake_again(self):
        if self.sleep_level == 2 and self.quantization == "bitsandbytes":
            raise ValueError(
                "rollout.sleep_level=2: vLLM cannot read bitsandbytes weights again; set rollout.sleep_level=1"
            )
        return self


class S2T(Section):
    """Silencing Spurious Tokens, the keep-mask of STAPO."""

    preset: Literal["paper", "paper-v1", "article", "full", "high-entropy", "random"] = "paper"
    """Sets the fields below: the revised paper, its first version, the authors' article (which also sets
    `objective.entropy_coef`), or an ablation: silence all candidates, the high-entropy ones, a random share."""
    enabled: bool = True
    """Off: no token is silenced. The share of spurious tokens and of their gradient is still logged."""
    tau_p: float = Field(0.002, gt=0, le=1)
    """Candidates are tokens of positive advantage with a probability below this."""
    quantile: float = Field(0.75, ge=0, le=1)
    """tau_h is this quantile of the entropy over `population`."""
    population: Literal["candidates", "all"] = "candidates"
    """Tokens whose entropies the quantile is taken of: the candidates (revised paper) or all
    completion tokens of the mini-batch (first version)."""
    silence: Literal["low-entropy", "high-entropy", "random", "all"] = "low-entropy"
    """Candidates to silence: those below tau_h; the same share from the top of the entropies; the same
    share at random; all."""
    statistics: Literal["current", "old"] = "old"
    """Policy that supplies probability and entropy to the keep-mask: the one before the first update of the
    step, or the current one (Algorithm 1 of the paper) at the price of a pass; see docs/results.md."""
    adaptive: bool = False
    """Experimental: move `tau_p` after each step so that the silenced share stays near `target_share`."""
    target_share: float = Field(1e-4, gt=0, lt=1)
    """`adaptive` only: silenced tokens as a share of all completion tokens."""
    tau_p_min: float = Field(2e-4, gt=0, le=1)
    """`adaptive` only: lower bound of `tau_p`."""
    tau_p_max: float = Field(2e-2, gt=0, le=1)
    """`adaptive` only: upper bound of `tau_p`."""

    @model_validator(mode="after")
    def _adaptive_values_fit_together(self):
        if self.adaptive and not self.tau_p_min <= self.tau_p <= self.tau_p_max:
            raise ValueError(
                f"objective.s2t.tau_p={self.tau_p} is not between tau_p_min={self.tau_p_min} and "
                f"tau_p_max={self.tau_p_max}: move one"
            )
        if self.adaptive and not self.enabled:
            raise ValueError("objective.s2t.adaptive needs objective.s2t.enabled=true: switch one")
        return self


class Objective(Section):
    """Advantages, token loss and which tokens it is summed over."""

    scale_rewards: Literal["group", "none"] = "group"
    """Divide advantages by the group's standard deviation, or not (Dr. GRPO)."""
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """Mean over the tokens of the mini-batch (DAPO); mean over each sequence, then over sequences
    (GRPO); sum over completions x `max_completion_length` (Dr. GRPO)."""
    epsilon: float = Field(0.2, ge=0, lt=1)
    """Lower clip: the ratio is not rewarded for falling below 1 - epsilon."""
    epsilon_high: float = Field(0.28, ge=0)
    """Upper clip: the ratio is not rewarded for rising above 1 + epsilon_high."""
    beta: float = Field(0.0, ge=0)
    """Coefficient of the KL divergence (k3 estimator) from the reference: the base without the adapter."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus. Its gradient takes the slower, recomputing LM head."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Train on this share of the mini-batch's tokens, those of highest entropy (20-Entropy: 0.2)."""
    renormalize: bool = True
    """Divide by the tokens that the masks keep (STAPO), or by all (20-Entropy: arXiv 2506.01939, eq. 5)."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: the trainer's log-probabilities before the step's first update, or the
    engine's, which need no pass over the later mini-batches (the keep-mask may need one of its own)."""
    sampler_correction: Literal["token-truncate", "sequence-mask", "off"] = "token-truncate"
    """For the difference between trainer and engine, with `old_logprobs=trainer`: weight each token by
    min(old / rollout, `sampler_cap`); or each sequence by its product of old / rollout, and by 0 where
    that is above the cap; or nothing."""
    sampler_cap: float = Field(2.0, gt=0)
    """Largest weight of `sampler_correction`."""
    s2t: S2T = S2T()


class Train(Section):
    """Optimisation."""

    max_steps: int = Field(200, ge=1)
    """Steps; one step is one batch of rollouts and its updates."""
    batch_size: int = Field(64, ge=1)
    """Prompts per step, over all processes."""
    mini_batch_size: int = Field(16, ge=1)
    """Prompts per optimiser update, over all processes; must divide `batch_size`."""
    max_tokens_per_microbatch: int = Field(16384, ge=1)
    """Tokens, padding included, in one forward and backward pass on one process; halved for the rest of the run where
    they do not fit into memory."""
    max_skipped_updates: int = Field(5, ge=1)
    """Updates in a row that may be skipped, because loss or gradient is not finite, before the run ends."""
    learning_rate: float = Field(1e-5, gt=0)
    """The rate that the warm-up ends with."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up; all updates of a step have one rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: as it is, or falling towards 0 at `max_steps`, in a line or as half a wave."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping by global norm."""
    optim: Literal["adamw", "paged_adamw_8bit"] = "adamw"
    """`paged_adamw_8bit` comes from bitsandbytes."""
    park_trainer: bool = False
    """Keep the trainer's frozen base in pinned host memory during vLLM's rollouts (on a GPU)."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (non-reentrant)."""
    offload_activations: bool = False
    """Keep what gradient checkpointing saves, one hidden state per layer and token, in host memory."""
    compile: bool = False
    """Compile the decoder layers with `torch.compile`."""
    lm_head_memory_gb: float = Field(0.25, gt=0)
    """Workspace of the chunked LM head, in GiB."""


class Log(Section):
    """Logging and checkpoints."""

    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Accelerate trackers, besides the metrics file of the run folder."""
    project: str = Field("stapo_lite", pattern=r"^\w[\w .-]*$")
    """Project name shown by the trackers; TensorBoard makes a folder of it."""
    log_completions_steps: int = Field(10, ge=0)
    """Print sample completions every so many steps; 0 for never."""
    save_steps: int = Field(50, ge=0)
    """Checkpoint every so many steps, and at the end; 0 for only at the end."""
    save_total_limit: int = Field(2, ge=1)
    """Checkpoints kept, newest first."""


class Audit(Section):
    """The token log: what S2T makes of its candidates, for `python -m stapo_lite.audit`."""

    enabled: bool = False
    """Write the candidates of each step, in context and with alternatives, and where tokens lie in the
    probability-entropy plane."""
    tokens_per_step: int = Field(64, ge=1)
    """Most candidates, and points of the plane, that a step writes; about 0.7 kB for each of both."""
    context: int = Field(40, ge=0)
    """Tokens shown before and after a candidate."""


class Evaluation(Section):
    """Benchmarks during training, of completions of at most `rollout.max_completion_length` tokens."""

    steps: int = Field(0, ge=0)
    """Evaluate before the first step, every so many steps and at the end; 0 for never."""
    benchmarks: list[str] = Field(["aime24", "aime25", "amc23"], min_length=1)
    """As in an evaluation (below)."""
    num_samples: int | None = Field(None, ge=1)
    """Samples per problem; by default what each benchmark asks for."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with this probability."""


_NO_S2T = {"objective.s2t.enabled": False, "objective.entropy_coef": 0.0}
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "stapo": {},  # the defaults
    "justrl": _NO_S2T,
    "20-entropy": _NO_S2T | {"objective.top_entropy_quantile": 0.2, "objective.renormalize": False},
    "dapo": _NO_S2T | {"rollout.dynamic_sampling": True, "reward.overlong_penalty": 1.0},
    "grpo": _NO_S2T | {"objective.aggregation": "sequence-mean", "objective.epsilon_high": 0.2, "objective.beta": 0.04},
    "dr-grpo": _NO_S2T
    | {"objective.aggregation": "constant", "objective.epsilon_high": 0.2, "objective.scale_rewards": "none"},
}
_S2T_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},  # the defaults
    "paper-v1": {"objective.s2t.quantile": 0.8, "objective.s2t.population": "all"},
    "article": {
        "objective.s2t.tau_p": 0.01,
        "objective.s2t.quantile": 0.05,
        "objective.s2t.population": "all",
        "objective.entropy_coef": 0.001,
    },
    "full": {"objective.s2t.silence": "all"},
    "high-entropy": {"objective.s2t.silence": "high-entropy"},
    "random": {"objective.s2t.silence": "random"},
}
PRESETS: Presets = {"algorithm": _ALGORITHMS, "objective.s2t.preset": _S2T_PRESETS}
"""What these two keys set where the user leaves it open, the first one first; docs/deviations.md has the sources."""


class Config(Section):
    """A whole run."""

    algorithm: Literal["stapo", "grpo", "dr-grpo", "dapo", "justrl", "20-entropy"] = "stapo"
    """Sets fields of `objective`, `rollout` and `reward`; a field that is given explicitly stays as given."""
    model: UserPath
    """Base model: a folder, or a name on the Hub."""
    output_dir: UserPath
    """Run folder: resolved config, metrics, checkpoints, adapter."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the base weights and of the forward pass; `float16` for cards without bfloat16 (T4, RTX 20)."""
    quantization: Literal["nf4"] | None = None
    """`nf4` trains on a 4-bit base (QLoRA, bitsandbytes)."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Every random draw of the run follows from this seed and the step."""
    stop_on: list[Symptom] = []
    """Warnings of docs/faults.md that end the run, with adapter and checkpoint, where the others are only printed."""
    lora: Lora = Lora()
    data: Data = Data()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    objective: Objective = Objective()
    train: Train = Train()
    evaluation: Evaluation = Evaluation()
    audit: Audit = Audit()
    log: Log = Log()

    @model_validator(mode="before")
    @classmethod
    def _presets_fill_what_is_left_open(cls, tree: Any) -> Any:
        return _fill_presets(tree, PRESETS)

    @model_validator(mode="after")
    def _values_fit_together(self):
        train, longest = self.train, self.data.max_prompt_length + self.rollout.max_completion_length
        if train.batch_size % train.mini_batch_size:
            raise ValueError(
                f"train.batch_size={train.batch_size} is not divisible by "
                f"train.mini_batch_size={train.mini_batch_size}: choose a divisor"
            )
        if self.rollout.max_num_seqs < self.rollout.num_generations:
            raise ValueError(
                f"rollout.max_num_seqs={self.rollout.max_num_seqs} is less than one group, "
                f"rollout.num_generations={self.rollout.num_generations}: raise it"
            )
        uncorrected = self.objective.old_logprobs == "trainer" and self.objective.sampler_correction == "off"
        if self.rollout.max_lag and uncorrected:
            raise ValueError(
                f"rollout.max_lag={self.rollout.max_lag} needs a correction for older adapters: set "
                "objective.sampler_correction=token-truncate, or objective.old_logprobs=rollout"
            )
        if self.rollout.engine == "server" and train.park_trainer:
            raise ValueError(
                "train.park_trainer=true needs vLLM in the process: rollout.engine=server has its own card"
            )
        if self.lora.dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError("lora.dtype=bfloat16 needs dtype=bfloat16: change one")
        if train.offload_activations and not train.gradient_checkpointing:
            raise ValueError("train.offload_activations needs train.gradient_checkpointing=true: switch one")
        if train.max_tokens_per_microbatch < longest:
            raise ValueError(
                f"train.max_tokens_per_microbatch={train.max_tokens_per_microbatch} is less than one "
                f"sequence, data.max_prompt_length + rollout.max_completion_length = {longest}: "
                "raise it or shorten the sequences"
            )
        return self


class EvalEngine(Engine):
    """Sampling."""

    max_completion_length: int = Field(20480, ge=1)
    """Longest completion, in tokens."""
    gpu_memory_utilization: float = Field(0.9, gt=0, lt=1)
    """vLLM on a GPU: share of the card's memory it may take."""
    num_samples: int | None = Field(None, ge=1)
    """Samples per problem; by default 32 for AIME24, AIME25 and AMC23, 4 for the others, 1 for a file."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with this probability."""


class EvalPrompting(Prompting):
    """How a problem becomes a prompt."""

    prompt_suffix: str = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    """Text appended to the last user message."""
    max_prompt_length: int = Field(2048, ge=1)
    """Longest prompt, in tokens."""


class Grading(Section):
    """Judging the answers by rules."""

    timeout: float = Field(5.0, gt=0, le=1e6)
    """Seconds of wall-clock time after which a worker is killed and its answer is wrong."""
    num_workers: int = Field(2, ge=1)
    """Worker processes."""


class Verifier(Section):
    """A second judge: a language model that is asked only about answers that the rules reject."""

    model: OptionalPath = None
    """Folder or Hub name; none is asked by default."""
    max_prompt_length: int = Field(4096, ge=64)
    """Tokens of problem, gold and the end of the response that it sees."""
    batch_size: int = Field(8, ge=1)
    """Answers judged at the same time."""


EVAL_PRESETS: Presets = {
    "decoding": {
        "training-aligned": {},  # the defaults
        "justrl": {"rollout.temperature": 0.7, "rollout.top_p": 0.9},
    }
}
"""The two decodings of the paper's tables."""


class EvalConfig(Section):
    """An evaluation: `python -m stapo_lite.evaluate`."""

    model: UserPath
    """A folder, or a name on the Hub: the adapter's base, or a merged model."""
    adapter: OptionalPath = None
    """Folder with an adapter in PEFT's format."""
    output_dir: UserPath
    """Samples, verdicts and results; an interrupted evaluation goes on there."""
    benchmarks: list[str] = Field(BENCHMARK_NAMES, min_length=1)
    """Names of these six, or `.jsonl` files with `problem` and `answer`. A file whose name begins with one of the six
    is taken for that benchmark."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many problems of each benchmark."""
    decoding: Literal["training-aligned", "justrl"] = "training-aligned"
    """Sets temperature and top-p: 1.0 / 1.0, as rollouts in training have them, or 0.7 / 0.9, the default of the
    paper's revision."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the weights."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Each sample has a seed of its own that follows from this, the problem and its number."""
    data: EvalPrompting = EvalPrompting()
    rollout: EvalEngine = EvalEngine()
    grading: Grading = Grading()
    verifier: Verifier = Verifier()

    @model_validator(mode="before")
    @classmethod
    def _decoding_fills_what_is_left_open(cls, tree: Any) -> Any:
        return _fill_presets(tree, EVAL_PRESETS)


def load_config(source: str | Path | dict[str, Any], overrides: list[str] | None = None) -> Config:
    """Read a YAML config and apply `key.sub=value` overrides (values are YAML too).

    Args:
        source: the file, or what it would hold as nested dictionaries.

    Raises:
        InputError: the file is missing or not a mapping; a key is unknown (with the nearest match);
            a value has the wrong type or range; the batch sizes do not fit together.
    """
    return _load(Config, PRESETS, source, overrides)


def load_eval_config(source: str | Path | dict[str, Any], overrides: list[str] | None = None) -> EvalConfig:
    """The same for an evaluation."""
    return _load(EvalConfig, EVAL_PRESETS, source, overrides)


def _load(schema: type[S], presets: Presets, source: str | Path | dict, overrides: list[str] | None) -> S:
    if isinstance(source, dict):
        path, tree = "config", copy.deepcopy(source)
    else:
        path, tree = str(source), _read_yaml(Path(source))
    _drop_what_presets_set(schema, tree, presets)
    for override in overrides or []:
        _apply_override(tree, override)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(schema, error.errors()[0])}") from None


class _Loader(yaml.SafeLoader):
    """YAML's own loader would take the last of two equal keys in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} stands there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise InputError(f"{path}: no such config file") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # a ValueError: bad UTF-8, huge numbers
        raise InputError(f"{path}: cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: must be a YAML mapping of keys, as in configs/quickstart.yaml")
    return tree


def check_processes(config: Config, num_processes: int) -> None:
    """Raises InputError where some processes would have no prompt."""
    if config.train.batch_size < num_processes:
        raise InputError(
            f"train.batch_size={config.train.batch_size} is less than the {num_processes} processes launched: raise it"
        )


def check_sharded(config: Config, engine: str) -> None:
    """Raises InputError where config or engine ask for what a base that is spread over processes cannot do."""
    for key, value in {
        "quantization": config.quantization,
        "train.park_trainer": config.train.park_trainer,
        "train.compile": config.train.compile,
        "rollout.engine": engine if engine == "transformers" else None,
    }.items():
        if value:
            raise InputError(f"{key}={value}: not with a base that FSDP shards over the processes")


def check_launched(num_processes: int) -> None:
    """Raises InputError where accelerate runs fewer processes than were launched; it would pass over it in silence."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes != launched:
        raise InputError(f"{launched} processes were launched, but accelerate runs {num_processes}")


def batch_arithmetic(config: Config, num_processes: int) -> str:
    """One line that says how a step is made up."""
    train, generations = config.train, config.rollout.num_generations
    rounds = config.rollout.max_sampling_rounds
    unit = f"round, at most {rounds} rounds a step" if config.rollout.dynamic_sampling else "step"
    return (
        f"{train.batch_size} prompts x {generations} completions = {train.batch_size * generations} "
        f"rollouts a {unit}, {train.batch_size // train.mini_batch_size} update(s) of "
        f"{train.mini_batch_size * generations} completions, on {num_processes} process(es) with "
        f"micro-batches of at most {train.max_tokens_per_microbatch} tokens; {train.max_steps} steps"
    )


def to_yaml(config: Section) -> str:
    """The resolved config as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def _apply_override(tree: dict, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError(f"override {override!r}: write it as key.sub=value")
    try:
        value = yaml.load(text, _Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"override {override[:80]!r}: the value is not YAML: {one_line(error)}") from None
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise InputError(f"override {override!r}: {parent} is a value, not a section")
    node[last] = value


def _drop_what_presets_set(schema: type[Section], tree: dict, presets: Presets) -> None:
    """Take out the fields that only repeat the file's own presets, so that an override of a preset can set them: the
    config of a run folder spells them all out."""
    own: dict = {"model": "any", "output_dir": "any"}
    for key in presets:
        if (name := _lookup(tree, key)) is not None:
            _fill(own, key, name)
    try:
        own = schema.model_validate(own).model_dump()
    except ValidationError:  # the file's own validation will say
        return
    for key in {key for table in presets.values() for fields in table.values() for key in fields}:
        parents, _, last = key.rpartition(".")
        if _lookup(tree, key) == _lookup(own, key):
            del _lookup(tree, parents)[last]


def _fill_presets(tree: Any, presets: Presets) -> Any:
    """The tree with the fields set that its presets set and it leaves open."""
    resolved = copy.deepcopy(tree)
    for key, table in presets.items():
        name = _lookup(resolved, key)
        for path, value in (table.get(name, {}) if isinstance(name, str) else {}).items():
            _fill(resolved, path, value)
    return resolved


def _lookup(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _fill(tree: Any, key: str, value: Any) -> None:
    """Set a value of the tree unless it has one; leave what is no tree to the validation."""
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(tree, dict):
            return
        tree = tree.setdefault(parent, {})
    if isinstance(tree, dict):
        tree.setdefault(last, value)


def _explain(schema: type[BaseModel], error: Any) -> str:
    """One of pydantic's errors as one line: key, what is wrong, what is allowed."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        *parents, last = error["loc"]
        allowed = list(_section(schema, parents).model_fields)
        near = difflib.get_close_matches(str(last), allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(allowed)}"
        return f"unknown key {key!r}: {hint}"
    if error["type"] == "missing":
        return f"key {key!r} is required: add it"
    if error["type"] == "value_error":  # our own validators, which name their keys
        return str(error["ctx"]["error"])
    return f"key {key!r}: {error['msg'][0].lower()}{error['msg'][1:]}, got {reprlib.repr(error['input'])}"


def _section(section: type[BaseModel], path: list) -> type[BaseModel]:
    for part in path:
        section = section.model_fields[part].annotation  # type: ignore[assignment]
    return section


def one_line(error: BaseException) -> str:
    """An error's text, or its beginning, for an InputError to quote."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


def reference() -> str:
    """The config reference as Markdown, generated from the field docstrings."""
    lines = ["# Config reference", "", "Generated by `python -m stapo_lite.config`; do not edit.", ""]

    def add(section: type[BaseModel], prefix: str, title: str = "") -> None:
        lines.extend(
            [f"## {title}{prefix.rstrip('.') or 'top level'}", "", " ".join((section.__doc__ or "").split()), ""]
        )
        lines.extend(["| key | type | default | meaning |", "|---|---|---|---|"])
        nested = []
        for name, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                nested.append((kind, f"{prefix}{name}."))
                continue
            default = "required" if field.is_required() else f"`{field.default!r}`"
            meaning = " ".join((field.description or "").split())
            lines.append(f"| `{prefix}{name}` | {_type_name(kind)} | {default} | {meaning} |")
        lines.append("")
        for kind, path in nested:
            add(kind, path, title)

    add(Config, "")
    add(EvalConfig, "", "evaluate: ")
    return "\n".join(lines).rstrip() + "\n"


def _type_name(kind: Any) -> str:
    name = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    for noise in ("typing.", "<class '", "'>"):
        name = name.replace(noise, "")
    return f"`{name}`".replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
