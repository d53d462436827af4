"""A run is opened here: what its config asks for, checked and put together, cheapest first."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from stapo_lite.algorithm.microbatches import TokenBudget
from stapo_lite.config import Config, Data, batch_arithmetic, check_processes, flatten, to_yaml
from stapo_lite.data.contamination import find_overlaps, load_problems
from stapo_lite.data.prompts import Prompts, check_rows, load_rows, prompt_text, stop_token_ids
from stapo_lite.errors import InputError
from stapo_lite.evaluation.exam import Exam
from stapo_lite.files import lock, read_object, write_text
from stapo_lite.model.loading import adapter_digest, find_start, load_tokenizer, model_digest
from stapo_lite.model.policy import load_policy, make_optimizer
from stapo_lite.model.processes import resolve_dtype
from stapo_lite.planning.choice import fit
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.rollout import check_options, make_engine, make_sampling, resolve_engine
from stapo_lite.rollout.episodes import RolloutFunction, find_function, play
from stapo_lite.training import checkpoint, lifecycle
from stapo_lite.training.checkpoint import Progress
from stapo_lite.training.guard import ending_symptom, new_symptoms
from stapo_lite.training.push import HubMirror
from stapo_lite.training.run import BEST, SCORE_FILE, Run, Sampler, take_next_best
from stapo_lite.training.self_check import check_engine
from stapo_lite.training.token_log import TokenLog
from stapo_lite.training.tracking import ENVIRONMENT_FILE, RunLog, read_metrics
from stapo_lite.training.update import Learner


class Given(NamedTuple):
    """Functions and rows that the caller of a run gives besides its config."""

    reward_funcs: Mapping[str, Callable] | None = None
    """Functions of this process by their names in `reward.functions`."""
    rows: Sequence[dict[str, Any]] | None = None
    """The data set; None for `data.source`."""
    rollout_func: RolloutFunction | None = None
    """A coroutine function; None for `rollout.function`."""


@contextmanager
def open_run(config: Config, resume: bool = False, force: bool = False, given: Given | None = None) -> Iterator[Run]:
    """Open a run, new or resumed, and close it; where something interrupts it, save the last whole step first.

    Raises:
        InputError: something in the config, the data or the model cannot be used.
        RunError: the disk is full at the end.
    """
    with ExitStack() as closing:  # all of it, whatever one does
        run = begin(config, resume, force, given or Given(), closing)
        try:
            yield run
        except BaseException as interruption:
            with lifecycle.undisturbed():
                run.save_checkpoint()
            if isinstance(interruption, SystemExit | KeyboardInterrupt):  # an error says by itself how to go on
                accelerator, saved = run.accelerator, run.snapshot.progress.step
                accelerator.print(f"stopped after step {saved}" + ("; --resume continues" if saved else ""))
            if not isinstance(interruption, GeneratorExit):  # the caller has seen enough
                raise
        run.finish()


def begin(config: Config, resume: bool, force: bool, given: Given, closing: ExitStack) -> Run:
    """Assemble a run: what is cheap and can fail first, weights last."""
    folder = Path(config.output_dir)
    accelerator = lifecycle.make_accelerator(config.log, folder / "logs")
    processes = accelerator.num_processes
    check_processes(config, processes)
    engine_name = resolve_engine(config.rollout.engine)
    resumed = resume and checkpoint.list_checkpoints(folder)
    if not resumed:
        lifecycle.check_no_run(folder, resume)
    config = config.model_copy(update={"dtype": resolve_dtype(config.dtype)})
    config = fit(config, engine_name, folder if resumed else None, processes)
    check_options(engine_name, config)  # with what was chosen for this card
    prompts, tokenizer, stop_tokens = load_prompts(config, given.rows, accelerator.print)
    # In a resumed run the start is read as a reference only.
    start = find_start(config.lora) if config.objective.beta or not resumed else None
    function = given.rollout_func or (find_function(config.rollout.function) if config.rollout.function else None)
    exam = Exam(config, tokenizer, function) if config.evaluation.steps else None
    accelerator.print(batch_arithmetic(config, processes))
    if accelerator.is_main_process:
        closing.enter_context(lock(folder))
    accelerator.wait_for_everyone()
    newest = checkpoint.newest_checkpoint(folder) if resume else None
    digests = {"prompts": prompts.digest[:16]} | weights_digests(config, start)
    environment = lifecycle.environment(engine_name, processes) | digests
    if newest is not None:
        for note in checkpoint.check_resume(newest, config.model_dump(mode="json"), environment, force):
            accelerator.print(note)
    hub = None
    if config.log.hub_model_id and accelerator.is_main_process:
        hub = HubMirror(config.log.hub_model_id, config.log.hub_private_repo, folder, tokenizer, stop_tokens)
        closing.callback(hub.close)
    rewards = RewardModel(config.reward, config.train.max_steps, given.reward_funcs)
    closing.callback(rewards.close)
    learner = make_learner(config, accelerator, start, newest)
    engine = make_engine(engine_name, config, stop_tokens, accelerator)
    closing.callback(engine.close)
    sample: Sampler = engine.generate
    if function is not None:
        sample = partial(play, engine, make_sampling(config, stop_tokens), tokenizer, function)
    if config.rollout.self_check:
        gap = check_engine(engine, learner, prompts)
        environment["self_check"] = f"{gap:.1e} nats between engine and trainer"
    log = open_folder(config, accelerator, environment, learner.progress.step)
    closing.callback(log.close)
    settings = {k: str(v) for k, v in flatten(config.model_dump()).items()}
    log.start_trackers(config.log.project, settings)
    if config.log.audit_tokens:
        learner.token_log = TokenLog(folder, config.log.audit_tokens, learner.policy, tokenizer, accelerator)
    history = read_metrics(folder)
    return Run(
        config, accelerator, prompts, tokenizer, environment, rewards, learner, engine, sample, log, exam, hub,
        snapshot=checkpoint.take_snapshot(learner.progress, learner.policy, learner.optimizer),
        history=history,
        symptom=ending_symptom(new_symptoms(history), config.stop_on),  # what ended it ends it still
    )  # fmt: skip


def weights_digests(config: Config, start: Path | None) -> dict[str, str]:
    """Digests of the weights that a run reads, by their keys.

    Args:
        start: folder of the adapter to start from; None if the run does not read it.
    """
    digests = {"model": model_digest(config.model)}
    if config.rollout.model:
        digests["rollout.model"] = model_digest(config.rollout.model)
    if start is not None:
        digests["lora.adapter"] = adapter_digest(start)
    return {key: digest[:16] for key, digest in digests.items() if digest is not None}


def make_learner(config: Config, accelerator: Accelerator, start: Path | None, newest: Path | None) -> Learner:
    """Policy and optimiser, new or as a checkpoint has them."""
    policy = load_policy(config, accelerator.device, start)
    optimizer = make_optimizer(policy, config.train)
    progress = Progress(tau_p=config.objective.s2t.tau_p)
    if newest is not None:
        progress = checkpoint.load_checkpoint(newest, policy, optimizer, config.objective.s2t)
    budget = TokenBudget(config.train.max_tokens_per_microbatch, progress.halvings)
    if config.train.park_trainer:
        policy.park()
    return Learner(config, policy, optimizer, budget, accelerator, progress)


def open_folder(config: Config, accelerator: Accelerator, environment: dict[str, str], step: int) -> RunLog:
    """Note in the run folder what begins, and drop what was written after the step that it continues from."""
    folder = Path(config.output_dir)
    with lifecycle.full_disk_is_a_run_error(folder):
        log = RunLog(folder, config.train.max_steps, step, accelerator)
        if accelerator.is_main_process:
            write_text(folder / ENVIRONMENT_FILE, json.dumps(environment, indent=1))  # first: it marks a run's folder
            write_text(folder / "config.yaml", to_yaml(config, given=True))
            if step < config.train.max_steps:
                shutil.rmtree(folder / "adapter", ignore_errors=True)  # of an earlier end of this run
            take_next_best(folder)
            drop_best(folder / BEST, step)
    return log


def drop_best(best: Path, step: int) -> None:
    """Delete the best adapter if it is of a later step than the one that the run goes on from, or of a run that was
    killed in its first. A folder without a score is not a run's."""
    with suppress(InputError, KeyError):
        of_step = read_object(best / SCORE_FILE)["step"]
        if step == 0 or of_step > step:
            shutil.rmtree(best, ignore_errors=True)


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
            raise InputError(f"data.{key}={column}: {d.source} has only the columns {', '.join(rows[0])}")
    contaminated = find_contaminated(rows, d, show) if d.drop_contaminated else set[int]()
    tokenizer, model_eos = load_tokenizer(config.model, config.max_sequence_length, config.lora.target_modules)
    prompts = Prompts(rows, tokenizer, d, graded, contaminated)
    dropped = len(rows) - len(contaminated) - len(prompts)
    note = f"; {dropped} longer than {d.max_prompt_length} tokens left out" if dropped else ""
    show(f"{len(prompts)} prompts from {d.source}{note}")
    return prompts, tokenizer, stop_token_ids(tokenizer, model_eos, d.apply_chat_template)


def find_contaminated(rows: Sequence[Any], d: Data, show: Callable[[str], None]) -> set[int]:
    """Numbers of the rows that hold a benchmark's problem.

    Raises:
        InputError: a benchmark cannot be read, or no row is left.
    """
    try:
        problems = load_problems(d.drop_contaminated or [])
    except InputError as error:
        raise InputError(f"data.drop_contaminated: {error}; or set data.drop_contaminated=false") from None
    overlaps = find_overlaps((prompt_text(row.get(d.prompt_column)) for row in rows), problems)
    contaminated = {overlap.row for overlap in overlaps}
    if len(contaminated) == len(rows):
        raise InputError(f"data.drop_contaminated: every row of {d.source} overlaps a benchmark: choose other data")
    held = len({overlap.problem for overlap in overlaps})
    show(f"left out {len(contaminated)} rows of {d.source}, which hold {held} benchmark problems")
    return contaminated
