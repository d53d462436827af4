"""From a config to a `Run`: cheap checks first, weights last.

Only this module, `cli.py` and `trainer.py` use both the core and its extras.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from stapo_lite.config import Config, batch_arithmetic, to_yaml
from stapo_lite.data.messages import stop_token_ids
from stapo_lite.data.prompts import make_prompts
from stapo_lite.data.rows import check_rows, load_rows
from stapo_lite.errors import InputError, RunError, explained, one_line
from stapo_lite.extras.audit.diagnostics import Diagnostics
from stapo_lite.extras.audit.report import Report
from stapo_lite.extras.audit.token_log import TokenLog
from stapo_lite.extras.evaluation.periodic import PeriodicEvaluation
from stapo_lite.extras.math.grading import MathGrader
from stapo_lite.extras.math.reward import math_reward
from stapo_lite.extras.publish.hub import HubMirror
from stapo_lite.extras.self_check import check_engine
from stapo_lite.extras.servers.engine import ServerEngine, api_key
from stapo_lite.extras.symptoms import Symptoms
from stapo_lite.extras.teacher import AdapterTeacher, ServerTeacher
from stapo_lite.extras.trackers import Trackers
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.extras.turns.environments import Environments, find_environments
from stapo_lite.extras.turns.episodes import RolloutFunction, find_function, run_episodes
from stapo_lite.extras.turns.frequencies import ToolFrequencies
from stapo_lite.extras.turns.tools import Chat
from stapo_lite.files import check_new, lock, write_text
from stapo_lite.model.adapter import find_adapter, find_start, name_layers
from stapo_lite.model.loading import load_weights
from stapo_lite.model.one_base import base_on
from stapo_lite.model.policy import make_optimizer, make_policy
from stapo_lite.model.processes import resolve_dtype
from stapo_lite.model.tokenizer import load_tokenizer
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.rollout.engine import RolloutEngine, RolloutSettings
from stapo_lite.rollout.make import check_options, resolve_engine, rollout_settings, start_vllm
from stapo_lite.training import checkpoint, lifecycle
from stapo_lite.training.callbacks import Callback, in_order
from stapo_lite.training.checkpoint import Progress
from stapo_lite.training.folder import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    drop_later_lines,
    holds_run,
    read_metrics,
)
from stapo_lite.training.learner import Learner, UpdateSettings
from stapo_lite.training.log import RunLog
from stapo_lite.training.memory import MemoryBudget, card_memory, propose, vllm_share
from stapo_lite.training.rehearsal import rehearse
from stapo_lite.training.run import Run
from stapo_lite.types import Prompt

logger = logging.getLogger(__name__)


class PythonInputs(NamedTuple):
    """What a caller in Python gives a run besides its config."""

    reward_funcs: Mapping[str, Callable] = {}
    """Functions of this process by their names in `reward.functions`."""
    rows: Sequence[dict[str, Any]] | None = None
    """The data set; None for `data.source`."""
    rollout_func: RolloutFunction | None = None
    """A coroutine function; None for `rollout.function`."""
    callbacks: Sequence[Callback] = ()
    """Called after the run's own."""


NOTHING = PythonInputs()


class DataSet(NamedTuple):
    """The prompts to train on, and what makes tokens of them."""

    prompts: Sequence[Prompt]
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    """They end a completion."""


@contextmanager
def open_run(
    config: Config, resume: bool = False, force: bool = False, python: PythonInputs = NOTHING
) -> Iterator[Run]:
    """Open a run, new or resumed, for `training.loop.train`, and close it: adapter and checkpoint
    are written at its end, and also if the caller stops early. If something interrupts it (an
    error, SIGTERM, Ctrl-C), a checkpoint of the last whole step is written.

    Args:
        resume: continue from the newest checkpoint in `config.output_dir`; start anew if
            there is none.
        force: continue even if keys that affect what the run computes have changed.

    Raises:
        InputError: something in the config, the data or the model cannot be used; found before
            weights are loaded if possible.
        RunError: the disk is full at the start or end, memory does not suffice for one sequence,
            or a callback failed.
    """
    folder = Path(config.output_dir)
    with ExitStack() as closing:  # closes everything, even if one close raises
        accelerator = lifecycle.make_accelerator(config.log, folder / "logs")
        # A mistake in the config should cost seconds, and leave the folder as it is.
        find_checkpoint(folder, resume)
        engine_name = resolve_engine(config.rollout.engine)
        dtype = resolve_dtype(config.dtype, config.rollout.quantization)
        lora = name_layers(config.lora, config.model)
        config = config.model_copy(update={"dtype": dtype, "lora": lora})
        check_options(engine_name, config.rollout, dtype)
        config, python = with_environments(config, python)
        data = open_data(config, python.rows, accelerator.print)
        accelerator.print(batch_arithmetic(config, accelerator.num_processes))
        accelerator.wait_for_everyone()  # all have looked into the folder, before one locks it
        if accelerator.is_main_process:
            closing.enter_context(lock(folder))
        accelerator.wait_for_everyone()
        newest = find_checkpoint(folder, resume)  # an earlier run may have written another one
        if newest:
            accelerator.print(checkpoint.check_resume(newest, config, force))
        run = build(config, engine_name, data, newest, python, accelerator, closing)
        try:
            run.call(Callback.on_train_begin)
            with suppress(GeneratorExit):  # the caller has seen enough
                yield run
            run.save_checkpoint()
            run.finish()
        except BaseException as interruption:
            save_interrupted(run, interruption)
            raise


def with_environments(config: Config, python: PythonInputs) -> tuple[Config, PythonInputs]:
    """Let environments play, if the run has some, and give rewards of weight 1."""
    environments = python.rollout_func
    if config.rollout.environment:
        environments = find_environments(config.rollout.environment)
    if not isinstance(environments, Environments):
        return config, python
    reward = config.reward
    given = reward.functions if "functions" in reward.model_fields_set else []
    # The config that a run has written names them already.
    added = [name for name in environments.rewards if name not in given]
    functions = [*given, *added]
    weights = reward.weights and [*reward.weights, *(1.0 for _ in added)]
    if functions:  # else the default one
        reward = reward.model_copy(update={"functions": functions, "weights": weights})
    own = {**python.reward_funcs, **environments.rewards}
    python = python._replace(rollout_func=environments, reward_funcs=own)
    return config.model_copy(update={"reward": reward}), python


def build(
    config: Config,
    engine_name: str,
    data: DataSet,
    newest: Path | None,
    python: PythonInputs,
    accelerator: Accelerator,
    closing: ExitStack,
) -> Run:
    """Load everything a run needs: what needs no weights, then the engine, which may fail, then the
    trainer's weights.

    Args:
        config: with its dtype resolved.
        newest: the checkpoint to continue from.
        closing: receives what must be closed.
    """
    rewards = open_rewards(config, python.reward_funcs, closing)
    models = closing.enter_context(ExitStack())  # closed after the callbacks
    rollout_func = python.rollout_func
    if rollout_func is None and config.rollout.function:
        rollout_func = find_function(config.rollout.function)
    chat = Chat(data.tokenizer, config.data)
    has_tools = isinstance(rollout_func, Environments) and rollout_func.has_tools
    if has_tools or config.data.chat_template_kwargs.get("tools"):
        chat.calls("", [])  # an InputError if the calls of this model cannot be read
    callbacks = make_callbacks(config, data.tokenizer, rollout_func is not None, accelerator)
    callbacks += python.callbacks
    for callback in callbacks:
        closing.callback(close, callback)
    # A resumed run reads the adapter that it started from as a reference only.
    start = None
    if config.objective.beta or newest is None:
        start = find_start(config.lora)
    sampling = rollout_settings(config, data.stop_tokens)
    engine = open_engine(config, engine_name, sampling, accelerator, models)
    base = shared_base(engine, config, accelerator)
    engine.sleep()  # leaves its memory to the trainer
    learner = open_learner(config, base, start, newest, accelerator, models)
    environment = lifecycle.environment(engine_name, accelerator.num_processes)
    environment |= try_out(config, engine, learner, data.prompts)
    # Nothing can fail any more but a full disk: the folder becomes this run's.
    open_folder(config, accelerator, environment, learner.progress.step)
    generate: Callable[..., Any] = engine.generate
    if rollout_func is not None:
        generate = partial(run_episodes, engine, sampling, chat, rollout_func)
    return Run(
        config=config,
        accelerator=accelerator,
        prompts=data.prompts,
        tokenizer=data.tokenizer,
        rewards=rewards,
        learner=learner,
        engine=engine,
        generate=generate,
        callbacks=in_order(callbacks),
        snapshot=checkpoint.take_snapshot(learner.progress, learner.policy, learner.optimizer),
        history=read_metrics(Path(config.output_dir)),
    )


def try_out(
    config: Config, engine: RolloutEngine, learner: Learner, prompts: Sequence[Prompt]
) -> dict[str, str]:
    """Check that the engine applies the adapter, and that the largest micro-batch fits the card.

    Returns:
        What the check has found, for the run's environment.
    """
    results = {}
    if config.rollout.self_check:
        temperature = config.rollout.temperature
        gap = check_engine(engine, learner, prompts, temperature, config.same_quantization)
        results["self_check"] = f"{gap:.1e} nats between engine and trainer"
    if learner.accelerator.device.type == "cuda":
        rehearse(learner)
        setting = learner.budget.setting
        learner.accelerator.print(f"{card_memory():.1f} GiB in use with {setting}")
    return results


def save_interrupted(run: Run, interruption: BaseException) -> None:
    """Write a checkpoint of the last whole step after an interruption, and say how to go on."""
    with lifecycle.undisturbed():
        try:
            run.save_checkpoint()
        except RunError as error:  # of a callback
            logger.warning("%s", error)
    if isinstance(interruption, SystemExit | KeyboardInterrupt):
        saved = run.snapshot.progress.step  # an error says by itself how to go on
        continues = "; the same command with --resume continues" if saved else ""
        run.accelerator.print(f"stopped after step {saved}{continues}")


def close(callback: Callback) -> None:
    """Close a callback; a warning if that fails, since something else may have ended the run."""
    try:
        callback.close()
    except Exception as error:
        logger.warning("callback %s: close failed (%s)", type(callback).__name__, one_line(error))


def find_checkpoint(folder: Path, resume: bool) -> Path | None:
    """The checkpoint that a run in this folder continues from, if it has one.

    Raises:
        InputError: it holds other files; or a run, which is not to be resumed or cannot be.
    """
    saved = checkpoint.list_checkpoints(folder)
    if not holds_run(folder):
        check_new(folder)
    elif not resume and (saved or (folder / METRICS_FILE).exists()):
        raise InputError(f"output_dir={folder} holds a run: --resume it, or choose another folder")
    if not (resume and saved) and (folder / "adapter").exists():
        raise InputError(f"--resume: {folder} has an adapter, but no checkpoint to continue from")
    return saved[-1] if saved else None


def open_data(
    config: Config, rows: Sequence[dict[str, Any]] | None, show: Callable[[str], None]
) -> DataSet:
    """Read the data set, and check every prompt and the model.

    Args:
        rows: of the data set; None reads `data.source`.
    """
    settings = config.data
    if rows is None:
        rows = load_rows(settings)
    else:
        check_rows(rows, f"data.source={settings.source}")
    tokenizer, model_eos = load_tokenizer(config.model)
    graded = "math" in config.reward.functions
    prompts = make_prompts(rows, tokenizer, settings, graded)
    dropped = len(rows) - len(prompts)
    note = f"; {dropped} longer than {settings.max_prompt_length} tokens left out"
    show(f"{len(prompts)} prompts from {settings.source}{note if dropped else ''}")
    stop_tokens = stop_token_ids(tokenizer, model_eos, settings.apply_chat_template)
    return DataSet(prompts, tokenizer, stop_tokens)


def open_rewards(
    config: Config, functions: Mapping[str, Callable], closing: ExitStack
) -> RewardModel:
    """The reward functions.

    Args:
        functions: the caller's own, by name.
    """
    grader = MathGrader()
    closing.callback(grader.close)
    built_in = {"math": partial(math_reward, grader, config.reward)}
    rewards = RewardModel(config.reward, config.train.max_steps, functions, built_in)
    closing.callback(rewards.close)
    return rewards


def make_callbacks(
    config: Config, tokenizer: Any, several_turns: bool, accelerator: Accelerator
) -> list[Callback]:
    """The callbacks of a run; each extra takes a line or two here.

    Args:
        several_turns: whether a rollout function makes the completions.
    """
    log = config.log
    objective = config.objective
    symptoms = Symptoms(config.stop_on, config.reward.probe)
    callbacks: list[Callback] = [Diagnostics(), RunLog(), symptoms, Report()]
    if objective.teacher_adapter:
        key = "objective.teacher_adapter"
        teacher = find_adapter(config.lora, objective.teacher_adapter, key)
        callbacks.append(AdapterTeacher(objective.teacher_weight, teacher))
    if url := objective.teacher_server:
        callbacks.append(ServerTeacher(objective.teacher_weight, url, api_key()))
    if several_turns:
        callbacks.append(ToolFrequencies())
    if config.evaluation.steps:
        callbacks.append(PeriodicEvaluation(config, tokenizer))
    if log.audit_tokens:
        callbacks.append(TokenLog(log.audit_tokens))
    if log.report_to:
        callbacks.append(Trackers(accelerator))
    if log.hub_model_id and accelerator.is_main_process:
        callbacks.append(HubMirror(log.hub_model_id, log.hub_private_repo))
    return callbacks


def open_engine(
    config: Config,
    name: str,
    sampling: RolloutSettings,
    accelerator: Accelerator,
    closing: ExitStack,
) -> RolloutEngine:
    """Start the engine of a run: servers, or one in this process."""
    accelerator.print(f"starting {name}, which may take minutes")
    engine: RolloutEngine
    if name == "server":
        folder = Path(config.output_dir)
        engine = ServerEngine(config.dtype, sampling, config.rollout, folder, accelerator)
    elif name == "transformers":
        engine = TransformersEngine(sampling, config.rollout.max_num_seqs)
    else:
        engine = start_vllm(config, sampling, vllm_share(config))
    closing.callback(engine.close)
    return engine


def shared_base(engine: RolloutEngine, config: Config, accelerator: Accelerator) -> Any | None:
    """A base model on the engine's weights; None if the trainer needs a copy of its own.

    Raises:
        InputError: the weights are not laid out as the model's.
    """
    weights = engine.shared_base() if config.may_share_base else None
    if weights is None:
        return None
    # There may be no memory left for a copy.
    with explained(
        "rollout.share_base: the weights do not fit", InputError, fix=": set it to false"
    ):
        return base_on(weights, config.model, config.dtype, accelerator.device)


def open_learner(
    config: Config,
    base: Any | None,
    start: Path | None,
    newest: Path | None,
    accelerator: Accelerator,
    closing: ExitStack,
) -> Learner:
    """Policy and optimiser, new or from a checkpoint.

    Args:
        base: on the engine's weights; None loads one.
        start: the adapter to start from.
        newest: the checkpoint.
    """
    if base is None:
        base = load_weights(config.model, config.dtype, accelerator.device, config.quantization)
    policy = make_policy(base, config, start)
    closing.callback(policy.drop_base)
    optimizer = make_optimizer(policy, config.train)
    progress = Progress()
    if newest is not None:
        progress = checkpoint.load_checkpoint(newest, policy, optimizer, config)
    count = sum(parameter.numel() for parameter in policy.parameters.values())
    setting = progress.memory or propose(config, count)
    budget = MemoryBudget(setting, policy.save_memory)
    return Learner(update_settings(config), policy, optimizer, budget, accelerator, progress)


def update_settings(config: Config) -> UpdateSettings:
    """What updates need of a config."""
    return UpdateSettings(
        config.objective,
        config.train.max_grad_norm,
        config.rollout.max_completion_length,
        config.max_sequence_length,
    )


def open_folder(
    config: Config, accelerator: Accelerator, environment: dict[str, str], step: int
) -> None:
    """Write config and environment to the run folder, and drop what was logged after `step`."""
    folder = Path(config.output_dir)
    if accelerator.is_main_process:
        with lifecycle.full_disk_is_a_run_error(folder):
            drop_later_lines(folder, step)
            # First, since it marks a run's folder.
            write_text(folder / ENVIRONMENT_FILE, json.dumps(environment, indent=1))
            write_text(folder / "config.yaml", to_yaml(config, given=True))
            if step < config.train.max_steps:  # left by an earlier end of this run
                shutil.rmtree(folder / "adapter", ignore_errors=True)
    accelerator.wait_for_everyone()
