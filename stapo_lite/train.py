"""STAPO training: rollouts, rewards, group advantages, keep-mask, clipped policy-gradient updates.

    accelerate launch -m stapo_lite.train configs/quickstart.yaml [key.sub=value ...] [--dry-run] [--resume [--force]]

Read `train` from top to bottom, then `update.py`: they are the method. docs/deviations.md lists where it
departs from the paper; first of all, a LoRA adapter trains instead of the whole model.
"""

import argparse
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from safetensors import SafetensorError
from tqdm.auto import tqdm

from stapo_lite import __version__, checkpoint, data
from stapo_lite.advantages import group_advantages
from stapo_lite.batching import TokenBudget, cut_evenly, sequence_length, split_evenly
from stapo_lite.benchmarks import load_benchmark
from stapo_lite.checkpoint import flatten
from stapo_lite.config import (
    Config,
    InputError,
    Objective,
    Prompting,
    RunError,
    Train,
    batch_arithmetic,
    check_launched,
    check_processes,
    check_sharded,
    load_config,
    one_line,
    one_line_errors,
    to_yaml,
)
from stapo_lite.exam import draw, judge, make_tasks, sample_key, summarise
from stapo_lite.files import write_text
from stapo_lite.grading import MathGrader
from stapo_lite.guard import RULES, new_symptoms
from stapo_lite.lifecycle import (
    check_no_run,
    end_on_sigterm,
    full_disk_is_a_run_error,
    lock,
    undisturbed,
    warn_of_unused_card,
)
from stapo_lite.policy import Policy, load_policy, load_tokenizer, make_optimizer
from stapo_lite.report import write_report
from stapo_lite.rewards import BUILT_IN, RewardModel, overlong_share
from stapo_lite.rollout import Decoding, RolloutEngine, Sampling, check_vllm, resolve_engine, vllm_version
from stapo_lite.s2t import linear_quantiles, next_tau_p
from stapo_lite.sharding import make_sharding
from stapo_lite.token_log import TokenLog
from stapo_lite.tracking import ENVIRONMENT_FILE, RunLog, Tally, read_metrics
from stapo_lite.types import Completion, Prompt, derived_seed
from stapo_lite.update import MAXIMA, SUMS, VALUES, Statistics, Update, measure, old_inputs, update, with_gradient

logger = logging.getLogger(__name__)

ROLLOUT_SUMS = (
    "groups", "zero_variance_groups", "completions", "truncated", "scored", "reward", "tokens", "sampled_nll",
    "batch_completions", "overlong_penalty", "lag",
)  # fmt: skip
ROLLOUT_MAXIMA = ("lag_max",)


def train(config: Config, resume: bool = False, force: bool = False) -> Iterator[dict[str, Any]]:
    """Run the training; yields the metrics of each step (docs/metrics.md).

    Who stops iterating ends the run there: adapter and checkpoint are written as at the last step. With several
    processes all must stop at the same one. What interrupts a step (an error, SIGTERM, Ctrl-C) leaves a checkpoint of
    the step before.

    Args:
        resume: continue from the newest intact checkpoint in `config.output_dir`; begin where there is none.
        force: continue with a config that differs where it decides what the run computes.

    Raises:
        InputError: something in the config, the data or the model cannot be used; found before any
            weights are loaded, where it can be.
        RunError: faults that the run outlives (docs/faults.md) did not end.
    """
    with ExitStack() as closing:  # all of it, whatever one does
        yield from _train(config, resume, force, closing)


def _train(config: Config, resume: bool, force: bool, closing: ExitStack) -> Iterator[dict[str, Any]]:
    accelerator = make_accelerator(config)
    rank, processes, is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    check_processes(config, processes)
    engine_name = resolve_engine(config.rollout.engine)
    shard = make_sharding(getattr(torch, config.dtype), accelerator.device)
    if shard is not None:
        check_sharded(config, engine_name)
    check_engine(engine_name, config)
    run_folder = Path(config.output_dir)
    if not resume:
        check_no_run(run_folder)
    prompts, tokenizer, stop_tokens = load_prompts(config, accelerator.print)
    exam = make_exam(config, tokenizer)
    accelerator.print(batch_arithmetic(config, processes))
    if is_main:
        closing.enter_context(lock(run_folder))
    accelerator.wait_for_everyone()
    newest = checkpoint.newest_checkpoint(run_folder) if resume else None
    surroundings = environment(engine_name, processes, prompts)
    if newest is not None:
        for note in checkpoint.check_resume(newest, config.model_dump(), surroundings, force):
            accelerator.print(note)
    rewards = RewardModel(config.reward)
    closing.callback(rewards.close)
    policy = make_policy(config, tokenizer, accelerator.device, shard)
    optimizer = make_optimizer(policy, config.train.optim, config.train.learning_rate, config.train.weight_decay)
    progress = checkpoint.Progress(tau_p=config.objective.s2t.tau_p)
    if newest is not None:
        progress = checkpoint.load_checkpoint(newest, policy, optimizer, config.objective.s2t.tau_p)
    in_step = (lambda count: max(gather_object([count]))) if policy.sharded else None
    budget = TokenBudget(config.train.max_tokens_per_microbatch, progress.halvings, in_step)
    if config.train.park_trainer:
        policy.park()
    engine = make_engine(engine_name, config, stop_tokens, accelerator)
    closing.callback(engine.close)
    with full_disk_is_a_run_error(run_folder):
        log = RunLog(run_folder, config.train.max_steps, progress.step, accelerator)
        if is_main:
            write_text(run_folder / "config.yaml", to_yaml(config))
            write_text(run_folder / ENVIRONMENT_FILE, json.dumps(surroundings, indent=1))
            if progress.step < config.train.max_steps:
                shutil.rmtree(run_folder / "adapter", ignore_errors=True)  # of the end before
    closing.callback(log.close)
    settings = {k: str(v) for k, v in flatten(config.model_dump()).items()}
    log.start_trackers(config.log.report_to, config.log.project, run_folder / "logs", settings)
    history = read_metrics(run_folder)
    token_log = None
    if config.audit.enabled:
        limits = config.audit.tokens_per_step, config.audit.context
        token_log = TokenLog(run_folder, *limits, policy, tokenizer, accelerator)

    def flush_logs() -> None:
        log.flush()
        if token_log is not None:
            token_log.flush()

    def save_checkpoint() -> None:
        if not is_main or snapshot.progress.step == 0:
            return
        try:
            flush_logs()
            limit = config.log.save_total_limit
            checkpoint.save_checkpoint(run_folder, snapshot, policy, config.model_dump(), surroundings, limit)
        except (OSError, SafetensorError) as error:  # a full disk, above all
            logger.warning("checkpoint-%d was not written (%s)", snapshot.progress.step, one_line(error))

    snapshot = checkpoint.take_snapshot(progress, policy, optimizer)
    dynamic = config.rollout.dynamic_sampling
    max_rounds = config.rollout.max_sampling_rounds if dynamic else 1

    def our_share(start: int, count: int) -> tuple[list[int], list[Prompt], list[int]]:
        """Ours of `count` places in the prompt order, their prompts and seeds: the draws do not depend on who draws."""
        order = data.prompt_order(len(prompts), config.seed, start, count)
        ours = [i for i in range(count) if (start + i) % processes == rank]
        seeds = [derived_seed(config.seed, start + i) for i in ours]
        return ours, [prompts[order[i]] for i in ours], seeds

    try:
        while progress.step < config.train.max_steps:
            step = progress.step + 1
            clock = time.perf_counter()
            seconds = dict.fromkeys(("rollout", "reward", "update"), 0.0)
            objective = with_tau_p(config.objective, progress.tau_p)
            rate = learning_rate(config.train, progress.step)
            for parameters in optimizer.param_groups:
                parameters["lr"] = rate

            # 1. Groups of completions from the adapter as it is now: one round, or with dynamic sampling as many
            #    as it takes to fill the batch with groups that have variance.
            engine.wake()
            engine.publish(policy, version=step)
            if exam and progress.step % config.evaluation.steps == 0 and not log.has_evaluation(progress.step):
                clock = lap(seconds, "rollout", clock)
                log.evaluation(progress.step, exam(engine, accelerator))
                clock = time.perf_counter()
            if config.rollout.max_lag:  # servers go on with the prompts of later steps while this one trains
                steps = min(1 + config.rollout.max_lag, config.train.max_steps - progress.step)
                _, ahead, seeds = our_share(progress.prompts_drawn, steps * config.train.batch_size)
                engine.prefetch(ahead, seeds)
            sampled: list[list[Completion]] = []
            batch: list[list[Completion]] = []  # the groups of all processes
            rounds = drawn = 0
            while len(batch) < config.train.batch_size and rounds < max_rounds:
                count = prompts_wanted(len(batch), config.train.batch_size, drawn)
                ours, asked, seeds = our_share(progress.prompts_drawn, count)
                groups = engine.generate(asked, seeds, progress=is_main) if ours else []
                lags = [step - c.adapter_version for group in groups for c in group]
                assert all(0 <= lag <= config.rollout.max_lag for lag in lags), "the engine lost the adapter"
                sampled += groups
                seed = derived_seed(config.seed, progress.prompts_drawn)
                progress.prompts_drawn += count
                drawn += count
                rounds += 1
                clock = lap(seconds, "rollout", clock)

                # 2. Rewards, and the groups that go into the batch; every process gets all of them.
                completions = [completion for group in groups for completion in group]
                texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
                for completion, text in zip(completions, texts, strict=True):
                    completion.text = text
                if ours:
                    rewards.score(completions, seed)
                everyones = sorted(gather_object(list(zip(ours, groups, strict=True))), key=lambda pair: pair[0])
                batch += [group for _, group in everyones if not dynamic or has_variance(group)]
                del batch[config.train.batch_size :]
                clock = lap(seconds, "reward", clock)
            held = [card_memory()]
            engine.sleep()
            policy.unpark()
            tally = Tally(ROLLOUT_SUMS + SUMS, ROLLOUT_MAXIMA + MAXIMA, VALUES, policy.device)
            count_rollouts(tally, sampled, step)

            # 3. Group advantages, of the rewards less the soft overlong punishment.
            for group in batch:
                penalties = [
                    config.reward.overlong_penalty
                    * overlong_share(
                        len(c.token_ids), config.rollout.max_completion_length, config.reward.overlong_buffer
                    )
                    for c in group
                ]
                scores = [math.nan if c.reward is None else c.reward - p for c, p in zip(group, penalties, strict=True)]
                advantages = group_advantages(
                    torch.tensor(scores, dtype=torch.float64), objective.scale_rewards == "group"
                )
                for completion, advantage in zip(group, advantages.tolist(), strict=True):
                    completion.advantage = advantage
                if is_main:
                    tally.add(batch_completions=len(group), overlong_penalty=sum(penalties))

            # 4. Our share of each mini-batch, as much work as that of any other process; and what later mini-batches
            #    need of the policy as it was before the step's first update.
            mini_batches = []
            for part in cut_evenly(batch, config.train.mini_batch_size):
                whole = list(itertools.chain(*part))
                runs = set(with_gradient(whole, objective))
                work = [sequence_length(c) if c in runs else 0 for c in whole]
                mini_batches.append([whole[i] for i in split_evenly(work, processes)[rank]])
            old: Statistics = {}
            for mini_batch in mini_batches[1:]:
                old |= measure(policy, old_inputs(mini_batch, objective), budget)

            # 5. One update for each mini-batch.
            updates, skipped = [], 0
            tokens = sum(len(c.token_ids) for mini_batch in mini_batches for c in with_gradient(mini_batch, objective))
            with tqdm(total=tokens, desc="update", unit="tok", leave=False, disable=None if is_main else True) as bar:
                for index, mini_batch in enumerate(mini_batches):
                    done = update(
                        policy,
                        optimizer,
                        mini_batch,
                        old if index > 0 else None,
                        objective,
                        max_completion_length=config.rollout.max_completion_length,
                        budget=budget,
                        max_grad_norm=config.train.max_grad_norm,
                        accelerator=accelerator,
                        tally=tally,
                        on_tokens=bar.update,
                        token_log=token_log,
                    )
                    if done is not None and done.skipped:
                        skipped += 1
                        progress.skipped_in_a_row += 1
                        if is_main:
                            logger.warning("update skipped: loss or gradient is not finite (norm %g)", done.grad_norm)
                        check_skipped(progress.skipped_in_a_row, config.train.max_skipped_updates)
                    elif done is not None:
                        updates.append(done)
                        progress.skipped_in_a_row = 0
            progress.step = step
            progress.halvings = budget.halvings = max(gather_object([budget.halvings]))
            held.append(card_memory())
            if config.train.park_trainer:
                policy.park()
            lap(seconds, "update", clock)

            # 6. Log, show, save.
            totals = tally.reduce(accelerator)
            metrics = step_metrics(
                step,
                totals,
                updates,
                seconds,
                sampling_rounds=rounds,
                batch_groups=len(batch),
                skipped_updates=skipped,
                peak_memory_gb=max(held, key=lambda gib: gib or 0.0),
                microbatch_tokens=budget.tokens,
                tau_p=progress.tau_p,
                learning_rate=optimizer.param_groups[0]["lr"],
            )
            if objective.s2t.adaptive and metrics["silenced_share"] is not None:
                s2t = objective.s2t
                progress.tau_p = next_tau_p(
                    s2t.tau_p, metrics["silenced_share"], s2t.target_share, s2t.tau_p_min, s2t.tau_p_max
                )
            log.step(metrics)
            if token_log is not None:
                token_log.write(step, objective.s2t.tau_p)
            if config.log.log_completions_steps and step % config.log.log_completions_steps == 0:
                log.samples(step, sampled)
            history.append(metrics)
            symptoms = new_symptoms(history)
            for symptom in symptoms if is_main else []:
                logger.warning("step %d, %s: %s", step, symptom, RULES[symptom].cause)
            stop = [symptom for symptom in symptoms if symptom in config.stop_on]
            if is_main:
                snapshot = checkpoint.take_snapshot(progress, policy, optimizer)
            if step == config.train.max_steps or stop or (config.log.save_steps and step % config.log.save_steps == 0):
                save_checkpoint()
            yield metrics
            if stop:
                accelerator.print(f"stop_on={stop[0]}: the run ends after step {step}")
                break

        if exam and not log.has_evaluation(progress.step):
            engine.wake()
            engine.publish(policy, version=progress.step + 1)
            log.evaluation(progress.step, exam(engine, accelerator))
    except BaseException as interruption:  # whatever it is, what was learned is kept
        with undisturbed():
            save_checkpoint()
        if not isinstance(interruption, GeneratorExit):  # the caller has seen enough
            raise
    if is_main:
        with full_disk_is_a_run_error(run_folder):
            flush_logs()
            policy.save_adapter(run_folder / "adapter")
            report = write_report(run_folder)
        print(f"{report}\nadapter: {run_folder / 'adapter'}")


def learning_rate(train: Train, step: int) -> float:
    """The rate of all updates of a step, from 0; never 0.

    Warm-up counts steps, as in the paper: veRL's scheduler advances once per batch of rollouts, whatever its
    mini-batches. transformers' schedules begin at 0, which would waste the first batch.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    left = (train.max_steps - step) / (train.max_steps - train.warmup_steps)
    factor = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[train.lr_scheduler_type]
    return train.learning_rate * factor


def check_skipped(in_a_row: int, limit: int) -> None:
    """Raises RunError where too many updates were skipped."""
    if in_a_row >= limit:
        raise RunError(
            f"{in_a_row} updates in a row had a loss or gradient that is not finite (train.max_skipped_updates): lower "
            "train.learning_rate or choose another dtype, delete the newest checkpoints, and use --resume --force"
        )


def with_tau_p(objective: Objective, tau_p: float) -> Objective:
    return objective.model_copy(update={"s2t": objective.s2t.model_copy(update={"tau_p": tau_p})})


def prompts_wanted(filled: int, size: int, drawn: int) -> int:
    """Prompts of the next round: a whole batch, or what fills it if as many groups are usable as so far."""
    return min(size, math.ceil((size - filled) * drawn / filled)) if filled else size


def has_variance(group: Sequence[Completion]) -> bool:
    """Whether its rewards differ, those that no reward function judged left out."""
    return len({c.reward for c in group if c.reward is not None}) > 1


def lap(seconds: dict[str, float], name: str, start: float) -> float:
    """Add the time since `start` to `seconds[name]`; returns the time now."""
    now = time.perf_counter()
    seconds[name] += now - start
    return now


def count_rollouts(tally: Tally, groups: Sequence[Sequence[Completion]], step: int) -> None:
    completions = [completion for group in groups for completion in group]
    rewards = [c.reward for c in completions if c.reward is not None]
    lags = [step - c.adapter_version for c in completions]
    tally.add(
        groups=len(groups),
        zero_variance_groups=sum(not has_variance(group) for group in groups),
        completions=len(completions),
        truncated=sum(c.truncated for c in completions),
        scored=len(rewards),
        reward=sum(rewards),
        tokens=sum(len(c.token_ids) for c in completions),
        sampled_nll=-sum(sum(c.rollout_logprobs) for c in completions),
        lag=sum(lags),
    )
    tally.raise_to(lag_max=max(lags, default=-math.inf))


def step_metrics(
    step: int,
    t: dict[str, Any],
    updates: Sequence[Update],
    seconds: dict[str, float],
    **others: float | None,
) -> dict[str, Any]:
    """The step's metrics as docs/metrics.md defines them; None where one has no value."""

    def ratio(numerator: float, denominator: float) -> float | None:
        return numerator / denominator if denominator else None

    thresholds = [u.tau_h for u in updates if u.tau_h is not None]
    p10, p50, p90 = linear_quantiles(t["entropies"], (0.1, 0.5, 0.9))
    kinds = ("spurious", "negative_rare", "negative_sure")
    total_seconds = sum(seconds.values())
    return {
        "step": step,
        "updates": len(updates),
        **others,
        "reward": ratio(t["reward"], t["scored"]),
        "overlong_penalty": ratio(t["overlong_penalty"], t["batch_completions"]),
        "zero_variance_groups": ratio(t["zero_variance_groups"], t["groups"]),
        "completion_length": ratio(t["tokens"], t["completions"]),
        "truncated_share": ratio(t["truncated"], t["completions"]),
        "lag_mean": ratio(t["lag"], t["completions"]),
        "lag_max": t["lag_max"],
        "sampled_nll": ratio(t["sampled_nll"], t["tokens"]),
        "entropy": ratio(t["entropy"], t["active_tokens"]),
        "entropy_p10": p10,
        "entropy_p50": p50,
        "entropy_p90": p90,
        "collision": ratio(t["collision"], t["active_tokens"]),
        "tau_h": ratio(sum(thresholds), len(thresholds)),
        **{f"{name}_share": ratio(t[name], t["batch_tokens"]) for name in ("kept", "silenced", "candidate", *kinds)},
        **{f"{name}_gradient_share": ratio(t[f"{name}_mass"], t["gradient_mass"]) for name in kinds},
        "clip_low_share": ratio(t["clipped_low"], t["trained_tokens"]),
        "clip_high_share": ratio(t["clipped_high"], t["trained_tokens"]),
        "loss": ratio(t["loss"], len(updates)),
        "kl": ratio(t["kl"], t["kl_tokens"]),
        "logit_grad_norm": ratio(t["logit_grad_norm"], t["trained_tokens"]),
        "grad_norm": ratio(sum(u.grad_norm for u in updates), len(updates)),
        "sampler_gap_mean": ratio(t["gap"], t["gap_tokens"]),
        "sampler_gap_k3": ratio(t["gap_k3"], t["gap_tokens"]),
        "sampler_gap_max": t["gap_max"],
        "sampler_capped_share": ratio(t["capped"], t["active_tokens"]),
        "tokens_per_second": t["tokens"] / total_seconds,
        **{f"seconds_{name}": value for name, value in seconds.items()},
        "seconds_step": total_seconds,
    }


def make_accelerator(config: Config) -> Accelerator:
    """Accelerate's view of the processes.

    Raises:
        InputError: a tracker is not installed, or accelerate runs fewer processes than were launched;
            it would pass over either in silence.
    """
    for name in config.log.report_to:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"log.report_to: {name} is not installed; pip install {name}")
    # Micro-batches of many shapes would leave holes that no other shape fits. Read once, before CUDA starts. vLLM up to
    # 0.30 looks at the old name only, and must know what torch is told.
    if "PYTORCH_ALLOC_CONF" in os.environ:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"]
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    on_cpu = not torch.accelerator.is_available()  # several processes on a CPU need to be told so
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))  # processes may finish sampling hours apart
    accelerator = Accelerator(
        cpu=on_cpu,
        kwargs_handlers=[patience],
    )
    cores = os.cpu_count() or 1
    if on_cpu and accelerator.num_processes == 1 and torch.get_num_threads() == 1 < cores:
        print(f"running on 1 of {cores} cores: accelerate launch --num_cpu_threads_per_process {cores} uses all")
    check_launched(accelerator.num_processes)
    if accelerator.is_main_process:
        warn_of_unused_card()
    return accelerator


def card_memory() -> float | None:
    """GiB of the card in use, CUDA's own and other processes' included; None without one.

    Torch's allocator keeps what an update has taken, so that this is the update's peak until the cache is emptied; its
    own count includes what a sleeping vLLM has given back.
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def environment(engine: str, processes: int, prompts: Sequence[Prompt]) -> dict[str, str]:
    """What the run runs on: hardware, versions, data; for its model card and to compare when it is resumed."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU with {os.cpu_count()} cores"
    names = ("torch", "transformers", "peft", "accelerate")
    return {
        "hardware": f"{processes} x {device}" if torch.cuda.is_available() else device,
        "processes": str(processes),
        "engine": f"vllm {vllm_version()}" if engine == "vllm" else engine,
        "prompts": hashlib.sha256(repr([(p.token_ids, p.answer) for p in prompts]).encode()).hexdigest()[:16],
        "stapo_lite": __version__,
        **{name: version(name) for name in names},
    }


def load_prompts(config: Config, show: Callable[[str], None]) -> tuple[list[Prompt], Any, tuple[int, ...]]:
    """The rendered prompts, the tokenizer and the tokens that end a completion."""
    d = config.data
    answer_column = d.answer_column if set(config.reward.functions) & set(BUILT_IN) else None
    rows = data.load_rows(
        d.source,
        subset=d.subset,
        split=d.split,
        prompt_column=d.prompt_column,
        answer_column=answer_column,
        max_operand=d.arithmetic_max_operand,
    )
    if d.drop_contaminated and d.source != "arithmetic":
        try:
            problems = [problem for name in d.benchmarks for problem in load_benchmark(name)[1]]
        except InputError as error:
            raise InputError(f"data.drop_contaminated: {error}; or set data.drop_contaminated=false") from None
        overlaps = data.find_overlaps([data.prompt_text(row.get(d.prompt_column)) for row in rows], problems)
        contaminated = {overlap.row for overlap in overlaps}
        rows = [row for number, row in enumerate(rows) if number not in contaminated]
        if not rows:
            raise InputError(f"data.drop_contaminated: every row of {d.source} overlaps a benchmark")
        held = len({overlap.problem for overlap in overlaps})
        show(f"{len(contaminated)} rows of {d.source} that hold {held} benchmark problems left out")
    longest = d.max_prompt_length + config.rollout.max_completion_length
    tokenizer, model_eos = load_tokenizer(config.model, longest, list(config.lora.target_modules))
    prompts = data.render_prompts(
        rows,
        tokenizer,
        source=d.source,
        prompt_column=d.prompt_column,
        answer_column=answer_column,
        apply_chat_template=d.apply_chat_template,
        chat_template_kwargs=dict(d.chat_template_kwargs),
        system_prompt=d.system_prompt,
        prompt_suffix=d.prompt_suffix,
        max_prompt_length=d.max_prompt_length,
        filter_overlong_prompts=d.filter_overlong_prompts,
    )
    dropped = len(rows) - len(prompts)
    note = f"; {dropped} longer than {d.max_prompt_length} tokens left out" if dropped else ""
    show(f"{len(prompts)} prompts from {d.source}{note}")
    return prompts, tokenizer, data.stop_token_ids(tokenizer, model_eos, d.apply_chat_template)


def make_exam(config: Config, tokenizer: Any) -> Callable[[RolloutEngine, Accelerator], dict[str, Any] | None] | None:
    """The benchmarks during training: a function of the engine, which gives the results on the main process.

    None where `evaluation.steps` is 0.
    """
    e, d = config.evaluation, config.data
    if not e.steps:
        return None
    prompting = {name: getattr(d, name) for name in Prompting.model_fields}
    tasks = make_tasks(e.benchmarks, e.num_samples, None, tokenizer, **prompting)
    decoding = Decoding(config.rollout.max_completion_length, e.temperature, e.top_p)

    def exam(engine: RolloutEngine, accelerator: Accelerator) -> dict[str, Any] | None:
        mine = tasks[accelerator.process_index :: accelerator.num_processes]
        quiet = None if accelerator.is_main_process else True
        bar = tqdm(
            draw(engine, mine, decoding, config.seed, tokenizer), "evaluate", len(mine), leave=False, disable=quiet
        )
        lines = {sample_key(line): line for line in gather_object(list(bar))}
        if not accelerator.is_main_process:
            return None
        grader = MathGrader(config.reward.timeout, config.reward.num_workers)
        judged = judge(tasks, [lines[task.key] for task in tasks], grader)
        grader.close()
        return {"temperature": e.temperature, "top_p": e.top_p, **summarise(tasks, judged)}

    return exam


def make_policy(config: Config, tokenizer: Any, device: torch.device, shard: Callable[[Any], None] | None) -> Policy:
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return load_policy(
        config.model,
        dtype=getattr(torch, config.dtype),
        quantization=config.quantization,
        lora_r=config.lora.r,
        lora_alpha=config.lora.lora_alpha,
        target_modules=list(config.lora.target_modules),
        lora_dtype=getattr(torch, config.lora.dtype),
        gradient_checkpointing=config.train.gradient_checkpointing,
        offload_activations=config.train.offload_activations,
        compile_layers=config.train.compile,
        temperature=config.rollout.temperature,
        pad_token_id=pad,
        lm_head_memory_bytes=int(config.train.lm_head_memory_gb * 2**30),
        lm_head_triton=config.train.lm_head_triton,
        device=device,
        seed=config.seed,
        shard=shard,
    )


def check_engine(name: str, config: Config) -> None:
    """Raises InputError where the engine cannot do what the config asks of it; before any weights are loaded."""
    if name == "vllm":
        check_vllm(config.rollout.quantization, config.rollout.sleep_level)
    if name != "transformers":
        return
    for key, value in {
        "rollout.model": config.rollout.model,
        "rollout.quantization": config.rollout.quantization,
        "train.park_trainer": config.train.park_trainer,
    }.items():
        if value:
            raise InputError(f"{key}={value} needs vLLM; the transformers engine samples from the trainer's own model")


def make_engine(name: str, config: Config, stop_tokens: tuple[int, ...], accelerator: Accelerator) -> RolloutEngine:
    r = config.rollout
    longest = config.data.max_prompt_length + r.max_completion_length
    sampling = Sampling(r.num_generations, r.max_completion_length, r.temperature, stop_tokens)
    if name == "transformers":
        from stapo_lite.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(sampling, r.max_num_seqs)
    if name == "server":
        from stapo_lite.rollout.server_engine import ServerEngine

        return ServerEngine(
            r.servers,
            r.model or config.model,
            sampling,
            dtype=config.dtype,
            max_model_len=longest,
            max_num_seqs=r.max_num_seqs,
            max_retries=r.max_restarts,
            timeout=r.server_timeout,
            shared_folder=r.shared_folder,
            max_lag=r.max_lag,
            processes=accelerator.num_processes,
            is_main=accelerator.is_main_process,
            share=lambda value: broadcast_object_list([value])[0],
        )
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(
        config.rollout.model or config.model,
        sampling,
        dtype=config.dtype,
        max_model_len=longest,
        max_num_seqs=r.max_num_seqs,
        lora_r=config.lora.r,
        target_modules=list(config.lora.target_modules),
        gpu_memory_utilization=r.gpu_memory_utilization,
        kv_cache_gb=r.kv_cache_gb,
        quantization=r.quantization,
        sleep_level=r.sleep_level,
        max_restarts=r.max_restarts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stapo_lite.train", description="Train a LoRA adapter with STAPO.")
    parser.add_argument("config", type=Path, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replace values of the config")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and the batch arithmetic, stop"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in output_dir, if any"
    )
    parser.add_argument("--force", action="store_true", help="resume with a config that makes it another run")
    arguments = parser.parse_intermixed_args()
    with one_line_errors():
        config = load_config(arguments.config, arguments.overrides)
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        check_processes(config, processes)
        if arguments.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(f"{to_yaml(config)}\n{batch_arithmetic(config, processes)}")
            return
        end_on_sigterm()
        for _ in train(config, arguments.resume, arguments.force):
            pass
        PartialState().destroy_process_group()  # its threads, still running at exit, may abort a process


if __name__ == "__main__":
    main()
