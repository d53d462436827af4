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

from stapo_lite.config import Config, batch_arithmetic, check_processes, to_yaml
from stapo_lite.data.prompts import Prompts, check_rows, load_rows, stop_token_ids
from stapo_lite.errors import InputError, RunError, explained, one_line
from stapo_lite.extras.audit.report import Report
from stapo_lite.extras.audit.token_log import TokenLog
from stapo_lite.extras.evaluation.contamination import find_contaminated
from stapo_lite.extras.evaluation.periodic import PeriodicEvaluation
from stapo_lite.extras.math.grading import MathGrader
from stapo_lite.extras.math.reward import math_reward
from stapo_lite.extras.planning.choice import fit
from stapo_lite.extras.publish.hub import HubMirror
from stapo_lite.extras.self_check import check_engine
from stapo_lite.extras.servers.engine import ServerEngine, api_key
from stapo_lite.extras.symptoms import Symptoms
from stapo_lite.extras.teacher import AdapterTeacher, ServerTeacher
from stapo_lite.extras.trackers import Trackers
from stapo_lite.extras.turns.episodes import RolloutFunction, find_function, play
from stapo_lite.extras.turns.tools import Chat
from stapo_lite.files import lock, write_text
from stapo_lite.model.loading import (
    adapter_digest,
    find_adapter,
    find_start,
    load_tokenizer,
    load_weights,
    model_digest,
)
from stapo_lite.model.one_base import base_on, check_weights
from stapo_lite.model.policy import make_optimizer, make_policy
from stapo_lite.model.processes import resolve_dtype
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.rollout import (
    RolloutEngine,
    check_options,
    make_engine,
    resolve_engine,
    rollout_settings,
)
from stapo_lite.training import checkpoint, lifecycle
from stapo_lite.training.budget import TokenBudget
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.checkpoint import Progress
from stapo_lite.training.folder import ENVIRONMENT_FILE, drop_later_lines, read_metrics
from stapo_lite.training.log import RunLog
from stapo_lite.training.run import Run
from stapo_lite.training.update import Learner, rehearse

logger = logging.getLogger(__name__)


class PythonInputs(NamedTuple):
    """What a caller in Python gives a run besides its config."""

    reward_funcs: Mapping[str, Callable] | None = None
    """Functions of this process by their names in `reward.functions`."""
    rows: Sequence[dict[str, Any]] | None = None
    """The data set; None for `data.source`."""
    rollout_func: RolloutFunction | None = None
    """A coroutine function; None for `rollout.function`."""
    callbacks: Sequence[Callback] = ()
    """Called after the run's own."""


NOTHING = PythonInputs()


class Inputs(NamedTuple):
    """What a run reads, checked."""

    config: Config
    """With what was chosen for this machine."""
    engine: str
    """Name of the engine, resolved."""
    prompts: Prompts
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    """They end a completion."""
    start: Path | None
    """Folder of the adapter to start from, if the run reads one."""
    teacher: Path | None
    """Folder of the teacher's adapter."""
    rollout_func: RolloutFunction | None
    python: PythonInputs


@contextmanager
def open_run(
    config: Config,
    resume: bool = False,
    force: bool = False,
    python: PythonInputs = NOTHING,
) -> Iterator[Run]:
    """Open a run, new or resumed, for `training.loop.train`, and close it: adapter and checkpoint
    are written at its end, and also if the caller stops early. If something interrupts it (an
    error, SIGTERM, Ctrl-C), a checkpoint of the last whole step is written.

    Args:
        resume: continue from the newest intact checkpoint in `config.output_dir`; start anew if
            there is none.
        force: continue even if keys that affect what the run computes have changed.

    Raises:
        InputError: something in the config, the data or the model cannot be used; found before
            weights are loaded if possible.
        RunError: the disk is full at the start or end, memory does not suffice for one sequence,
            or a callback failed.
    """
    with ExitStack() as closing:  # closes everything, even if one close raises
        folder = Path(config.output_dir)
        accelerator = lifecycle.make_accelerator(config.log, folder / "logs")
        inputs = check_inputs(config, resume, python, accelerator)
        if accelerator.is_main_process:
            closing.enter_context(lock(folder))
        accelerator.wait_for_everyone()
        environment, newest = check_checkpoint(inputs, resume, force, accelerator)
        run = build(inputs, environment, newest, accelerator, closing)
        try:
            run.call("on_train_begin")
            with suppress(GeneratorExit):  # the caller has seen enough
                yield run
            run.save_checkpoint()
            run.finish()
        except BaseException as interruption:
            save_interrupted(run, interruption)
            raise


def save_interrupted(run: Run, interruption: BaseException) -> None:
    """Write a checkpoint of the last whole step after an interruption, and say how to go on."""
    with lifecycle.undisturbed():
        try:
            run.save_checkpoint()
        except RunError as error:  # of a callback
            logger.warning("%s", error)
    if isinstance(interruption, SystemExit | KeyboardInterrupt):
        saved = run.snapshot.progress.step  # an error says by itself how to go on
        continues = "; --resume continues" if saved else ""
        run.accelerator.print(f"stopped after step {saved}{continues}")


def close(callback: Callback) -> None:
    """Close a callback; a warning if that fails, since something else may have ended the run."""
    try:
        callback.close()
    except Exception as error:
        logger.warning("callback %s: close failed (%s)", type(callback).__name__, one_line(error))


def check_inputs(
    config: Config, resume: bool, python: PythonInputs, accelerator: Accelerator
) -> Inputs:
    """Check everything that needs no weights, before the run folder is touched."""
    folder, processes = Path(config.output_dir), accelerator.num_processes
    check_processes(config, processes)
    engine = resolve_engine(config.rollout.engine)
    resumed = resume and bool(checkpoint.list_checkpoints(folder))
    if not resumed:
        lifecycle.check_no_run(folder, resume)
    dtype = resolve_dtype(config.dtype, config.rollout.quantization)
    config = config.model_copy(update={"dtype": dtype})
    config = fit(config, engine, folder if resumed else None, processes)
    check_options(engine, config)  # with what was chosen for this card
    prompts, tokenizer, stop_tokens = load_prompts(config, python.rows, accelerator.print)
    # A resumed run reads the start as a reference only.
    start = find_start(config.lora) if config.objective.beta or not resumed else None
    teacher = None
    if name := config.objective.teacher_adapter:
        teacher = find_adapter(config.lora, name, "objective.teacher_adapter")
    rollout_func = python.rollout_func
    if rollout_func is None and config.rollout.function:
        rollout_func = find_function(config.rollout.function)
    accelerator.print(batch_arithmetic(config, processes))
    return Inputs(
        config, engine, prompts, tokenizer, stop_tokens, start, teacher, rollout_func, python
    )


def check_checkpoint(
    inputs: Inputs, resume: bool, force: bool, accelerator: Accelerator
) -> tuple[dict[str, str], Path | None]:
    """The run's environment, and the checkpoint that it continues from.

    Raises:
        InputError: the checkpoint may not continue with this config (`check_resume`).
    """
    config = inputs.config
    newest = checkpoint.newest_checkpoint(Path(config.output_dir)) if resume else None
    environment = lifecycle.environment(inputs.engine, accelerator.num_processes)
    environment["prompts"] = inputs.prompts.digest[:16]
    environment |= weights_digests(config, inputs.start, inputs.teacher)
    if newest is not None:
        now = config.model_dump(mode="json")
        for note in checkpoint.check_resume(newest, now, environment, force):
            accelerator.print(note)
    return environment, newest


def weights_digests(config: Config, start: Path | None, teacher: Path | None) -> dict[str, str]:
    """Digests of the weights that a run reads, by their keys.

    Args:
        start: folder of the adapter to start from; None if the run does not read it.
        teacher: folder of the teacher's adapter, if there is one.
    """
    digests = {"model": model_digest(config.model)}
    if config.rollout.model:
        digests["rollout.model"] = model_digest(config.rollout.model)
    if start is not None:
        digests["lora.adapter"] = adapter_digest(start)
    if teacher is not None:
        digests["objective.teacher_adapter"] = adapter_digest(teacher)
    return {key: digest[:16] for key, digest in digests.items() if digest is not None}


def build(
    inputs: Inputs,
    environment: dict[str, str],
    newest: Path | None,
    accelerator: Accelerator,
    closing: ExitStack,
) -> Run:
    """Load everything a run needs; the engine, which may fail, before the trainer's weights.

    Args:
        newest: the checkpoint to continue from.
        closing: receives what must be closed.
    """
    config = inputs.config
    grader = MathGrader()
    closing.callback(grader.close)
    callbacks = make_callbacks(inputs, grader, accelerator)
    for callback in callbacks:
        closing.callback(close, callback)
    math = partial(math_reward, grader, config.reward)
    own = inputs.python.reward_funcs
    rewards = RewardModel(config.reward, config.train.max_steps, own, {"math": math})
    closing.callback(rewards.close)
    engine = start_engine(inputs, accelerator)
    closing.callback(engine.close)
    base = shared_base(engine, config, accelerator)
    engine.sleep()  # leaves its memory to the trainer
    learner = make_learner(config, accelerator, base, inputs.start, newest)
    if base is not None:
        closing.callback(learner.policy.drop_base)
    if config.train.park_trainer:
        closing.callback(learner.policy.park)  # before the engine wakes up to be closed
    if config.rollout.self_check:
        gap = check_engine(engine, learner, inputs.prompts)
        environment["self_check"] = f"{gap:.1e} nats between engine and trainer"
    if accelerator.device.type == "cuda":
        rehearse(learner)
    open_folder(config, accelerator, environment, learner.progress.step)
    generate: Callable[..., Any] = engine.generate
    if inputs.rollout_func is not None:
        settings = rollout_settings(config, inputs.stop_tokens)
        chat = Chat(inputs.tokenizer, config.data)
        generate = partial(play, engine, settings, chat, inputs.rollout_func)
    return Run(
        config=config,
        accelerator=accelerator,
        prompts=inputs.prompts,
        tokenizer=inputs.tokenizer,
        environment=environment,
        rewards=rewards,
        learner=learner,
        engine=engine,
        generate=generate,
        callbacks=callbacks,
        snapshot=checkpoint.take_snapshot(learner.progress, learner.policy, learner.optimizer),
        history=read_metrics(Path(config.output_dir)),
    )


def make_callbacks(inputs: Inputs, grader: MathGrader, accelerator: Accelerator) -> list[Callback]:
    """The callbacks of a run, in call order; each extra takes a line or two here."""
    config, log = inputs.config, inputs.config.log
    callbacks: list[Callback] = []
    weight = config.objective.teacher_weight
    if inputs.teacher is not None:
        callbacks.append(AdapterTeacher(weight, inputs.teacher))
    if url := config.objective.teacher_server:
        callbacks.append(ServerTeacher(weight, url, api_key()))
    callbacks += [RunLog(), Symptoms()]  # after a teacher, so that its metric is logged
    if config.evaluation.steps:
        callbacks.append(
            PeriodicEvaluation(
                config, inputs.tokenizer, grader, inputs.rollout_func, inputs.stop_tokens
            )
        )
    if log.audit_tokens:
        callbacks.append(TokenLog(log.audit_tokens))
    if log.report_to:
        callbacks.append(Trackers(accelerator))
    if log.hub_model_id and accelerator.is_main_process:
        callbacks.append(
            HubMirror(
                log.hub_model_id,
                log.hub_private_repo,
                Path(config.output_dir),
                inputs.tokenizer,
                inputs.stop_tokens,
            )
        )
    return [*callbacks, Report(), *inputs.python.callbacks]


def start_engine(inputs: Inputs, accelerator: Accelerator) -> RolloutEngine:
    """The engine of a run: servers, or one in this process."""
    config = inputs.config
    settings = rollout_settings(config, inputs.stop_tokens)
    if inputs.engine == "server":
        folder = Path(config.output_dir)
        return ServerEngine(config.dtype, settings, config.rollout, folder, accelerator)
    return make_engine(inputs.engine, config, settings)


def shared_base(engine: RolloutEngine, config: Config, accelerator: Accelerator) -> Any | None:
    """A base model on the engine's weights; None if the trainer needs a copy of its own.

    Raises:
        InputError: there is none, but the config requires one or memory is planned for one copy.
    """
    weights = engine.shared_base() if config.may_share_base else None
    must = config.rollout.share_base == "on" or config.quantization == "fp8"
    if weights is None:
        if must:
            raise InputError(
                "rollout.share_base: the engine has no weights to share (on a CPU vLLM packs those "
                "away that are not in 4 bits); set auto, and quantization to nf4 or null"
            )
        return None
    try:
        with explained("the weights of the engine cannot be used"):
            base = base_on(weights, config.model, config.dtype, accelerator.device)
            check_weights(base, config.model)
    except InputError as error:
        if must:
            raise
        if accelerator.device.type == "cuda" and config.memory == "auto":
            raise InputError(
                f"rollout.share_base: {error}; set it to off, and memory is planned for two copies"
            ) from error
        logger.warning("rollout.share_base: %s; the trainer loads a copy of its own", error)
        return None
    engine.keep_base()
    return base


def make_learner(
    config: Config,
    accelerator: Accelerator,
    base: Any | None,
    start: Path | None,
    newest: Path | None,
) -> Learner:
    """Policy and optimiser, new or from a checkpoint.

    Args:
        base: from `shared_base`; None loads one.
    """
    if base is None:
        assert config.quantization != "fp8"  # nothing to load: `shared_base` has raised
        base = load_weights(config.model, config.dtype, accelerator.device, config.quantization)
    policy = make_policy(base, config, start)
    optimizer = make_optimizer(policy, config.train)
    progress = Progress(tau_p=config.objective.s2t.tau_p)
    if newest is not None:
        progress = checkpoint.load_checkpoint(newest, policy, optimizer, config.objective.s2t)
    tokens = config.train.max_tokens_per_microbatch
    budget = TokenBudget(tokens, progress.halvings, policy.save_memory)
    return Learner(config, policy, optimizer, budget, accelerator, progress)


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


def load_prompts(
    config: Config, rows: Sequence[dict[str, Any]] | None, show: Callable[[str], None]
) -> tuple[Prompts, Any, tuple[int, ...]]:
    """The rendered prompts, the tokenizer and the tokens that end a completion.

    Args:
        rows: of the data set; None reads `data.source`.
    """
    d = config.data
    columns = {"prompt_column": d.prompt_column}
    if graded := "math" in config.reward.functions:
        columns["answer_column"] = d.answer_column
    rows = load_rows(d) if rows is None else check_rows(rows, f"data.source={d.source}")
    for key, column in columns.items():
        if column not in rows[0]:
            there = ", ".join(rows[0])
            why = "; the reward `math` needs it" if key == "answer_column" else ""
            raise InputError(f"data.{key}={column}: {d.source} has only the columns {there}{why}")
    contaminated = find_contaminated(rows, d, show) if d.drop_contaminated else set[int]()
    longest, modules = config.max_sequence_length, config.lora.target_modules
    tokenizer, model_eos = load_tokenizer(config.model, longest, modules)
    prompts = Prompts(rows, tokenizer, d, graded, contaminated)
    dropped = len(rows) - len(contaminated) - len(prompts)
    note = f"; {dropped} longer than {d.max_prompt_length} tokens left out" if dropped else ""
    show(f"{len(prompts)} prompts from {d.source}{note}")
    return prompts, tokenizer, stop_token_ids(tokenizer, model_eos, d.apply_chat_template)
