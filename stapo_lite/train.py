"""STAPO training: rollouts, rewards, group advantages, keep-mask, clipped policy-gradient updates.

    accelerate launch -m stapo_lite.train configs/quickstart.yaml [key.sub=value ...] [--dry-run] [--resume]

Read `train` from top to bottom, then `update`: they are the method. The one departure from the paper's
recipe is that a LoRA adapter trains instead of the whole model.
"""

import argparse
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from tqdm.auto import tqdm

from stapo_lite import checkpoint, data
from stapo_lite.advantages import group_advantages
from stapo_lite.batching import collate, pad_rows, split_by_tokens
from stapo_lite.checkpoint import flatten
from stapo_lite.config import (
    S2T,
    Config,
    InputError,
    Objective,
    batch_arithmetic,
    check_processes,
    exit_on_input_error,
    load_config,
    to_yaml,
)
from stapo_lite.objective import clipped_token_loss
from stapo_lite.policy import Policy, load_policy, load_tokenizer, make_optimizer, sum_gradients
from stapo_lite.report import write_report
from stapo_lite.rewards import BUILT_IN, RewardModel
from stapo_lite.rollout import RolloutEngine, Sampling, resolve_engine
from stapo_lite.s2t import candidate_mask, entropy_threshold, spurious_mask
from stapo_lite.tracking import RunLog, Tally, gather_values, read_metrics
from stapo_lite.types import Completion, Prompt, TokenStatistics

Statistics = dict[Completion, TokenStatistics]
"""Of each completion, [length] fp32, without gradient."""

SUMS = (
    "groups", "zero_variance_groups", "completions", "truncated", "scored", "reward", "tokens", "sampled_nll",
    "active_tokens", "trained_tokens", "entropy", "candidates", "silenced", "clipped_low", "clipped_high", "loss",
    "gap_tokens", "gap",
)  # fmt: skip
MAXIMA = ("gap_max",)


def train(config: Config, resume: bool = False) -> Iterator[dict[str, Any]]:
    """Run the training; yields the metrics of each step (docs/metrics.md).

    Args:
        resume: continue from the newest checkpoint in `config.output_dir`.

    Raises:
        InputError: something in the config, the data or the model cannot be used; found before any
            weights are loaded, where it can be.
    """
    accelerator = make_accelerator(config)
    rank, processes, is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    check_processes(config, processes)
    engine_name = resolve_engine(config.rollout.engine)
    run_folder = open_run_folder(config, resume, accelerator)
    prompts, tokenizer, stop_tokens = load_prompts(config, accelerator.print)
    accelerator.print(batch_arithmetic(config, processes))
    rewards = make_rewards(config)
    policy = make_policy(config, tokenizer, accelerator.device)
    optimizer = make_optimizer(policy, config.train.optim, config.train.learning_rate, config.train.weight_decay)
    progress = checkpoint.Progress()
    if resume:
        progress = checkpoint.load_checkpoint(checkpoint.latest_checkpoint(run_folder), policy, optimizer)
    engine = make_engine(engine_name, config, stop_tokens)
    accelerator.init_trackers(config.log.project, config={k: str(v) for k, v in flatten(config.model_dump()).items()})
    log = RunLog(run_folder, config.train.max_steps, progress.step, accelerator)

    while progress.step < config.train.max_steps:
        step = progress.step + 1
        clock = [time.perf_counter()]

        # 1. The prompts of this step: the same order for any number of processes, and our share of it.
        order = data.prompt_order(len(prompts), config.seed, progress.prompts_drawn, config.train.batch_size)
        mine = [prompts[i] for i in order[rank::processes]]

        # 2. Groups of completions from the adapter as it is now.
        engine.wake()
        engine.publish(policy, version=step)
        seed = (config.seed * 1_000_003 + step * processes + rank) % 2**31
        groups = engine.generate(mine, seed, progress=is_main)
        engine.sleep()
        completions = [completion for group in groups for completion in group]
        assert all(completion.adapter_version == step for completion in completions), "the engine lost the adapter"
        clock.append(time.perf_counter())

        # 3. Rewards and group advantages.
        texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        for completion, text in zip(completions, texts, strict=True):
            completion.text = text
        rewards.score(completions)
        scores = [[math.nan if c.reward is None else c.reward for c in group] for group in groups]
        advantages = group_advantages(torch.tensor(scores, dtype=torch.float64))
        for completion, advantage in zip(completions, advantages.flatten().tolist(), strict=True):
            completion.advantage = advantage
        clock.append(time.perf_counter())

        # 4. What later mini-batches need of the policy as it was before the step's first update.
        share = config.train.mini_batch_size // processes
        mini_batches = [
            [completion for group in groups[start : start + share] for completion in group]
            for start in range(0, len(groups), share)
        ]
        old: Statistics = {}
        for mini_batch in mini_batches[1:]:
            needed = {c: None for c in mini_batch if c.advantage != 0}
            if config.objective.s2t.statistics == "old":
                needed |= dict.fromkeys(mask_inputs(mini_batch, config.objective.s2t))
            old |= measure(policy, list(needed), config.train.max_tokens_per_microbatch)

        # 5. One update for each mini-batch.
        tally = Tally(SUMS, MAXIMA, policy.device)
        count_rollouts(tally, groups)
        updates = []
        work = sum(len(c.token_ids) for c in completions if c.advantage != 0)
        with tqdm(total=work, desc="update", unit="tok", leave=False, disable=None if is_main else True) as bar:
            for index, mini_batch in enumerate(mini_batches):
                rate = learning_rate(config.train.learning_rate, config.train.warmup_steps, progress.updates)
                for parameters in optimizer.param_groups:
                    parameters["lr"] = rate
                done = update(
                    policy,
                    optimizer,
                    mini_batch,
                    old if index > 0 else None,
                    config.objective,
                    max_tokens=config.train.max_tokens_per_microbatch,
                    max_grad_norm=config.train.max_grad_norm,
                    accelerator=accelerator,
                    tally=tally,
                    on_tokens=bar.update,
                )
                if done is not None:
                    updates.append(done)
                    progress.updates += 1
        progress.step = step
        progress.prompts_drawn += config.train.batch_size
        clock.append(time.perf_counter())

        # 6. Log, show, save.
        metrics = step_metrics(step, tally.reduce(accelerator), updates, rate, clock)
        log.step(metrics)
        if config.log.log_completions_steps and step % config.log.log_completions_steps == 0:
            log.samples(step, groups)
        last = step == config.train.max_steps
        if is_main and (last or (config.log.save_steps and step % config.log.save_steps == 0)):
            checkpoint.save_checkpoint(
                run_folder, progress, policy, optimizer, config.model_dump(), config.log.save_total_limit
            )
        yield metrics

    if is_main:
        policy.save_adapter(run_folder / "adapter")
        print(f"{write_report(run_folder)}\nadapter: {run_folder / 'adapter'}")
    for tracker in accelerator.trackers:
        tracker.finish()
    engine.close()
    rewards.close()


class Update(NamedTuple):
    """The same on every process."""

    grad_norm: float
    """Before clipping."""
    tau_h: float | None
    """None without candidates, or without S2T."""


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    mini_batch: Sequence[Completion],
    old: Statistics | None,
    objective: Objective,
    *,
    max_tokens: int,
    max_grad_norm: float,
    accelerator: Accelerator,
    tally: Tally,
    on_tokens: Callable[[int], Any] = lambda tokens: None,
) -> Update | None:
    """One optimiser update on this process's share of a mini-batch.

    J = sum I min(rho A, clip(rho) A) / sum I, over the tokens of the mini-batch on all processes. A
    completion of zero advantage adds nothing to the numerator, so it is not run; its tokens count in
    the denominator.

    Args:
        old: statistics of the policy before the step's first update; None where it is this one, so
            that the ratio is 1 and its gradient that of the log-probability.
        max_tokens: of a micro-batch.
        on_tokens: told of the completion tokens done.

    Returns:
        None, with nothing changed, where no token of the mini-batch has an advantage and is kept.
    """
    # The keep-mask and the denominator, from the whole mini-batch before any gradient.
    silenced: dict[Completion, torch.Tensor] = {}
    tau_h = None
    if objective.s2t.enabled:
        inputs = mask_inputs(mini_batch, objective.s2t)
        if old is not None and objective.s2t.statistics == "old":
            statistics = old
        else:
            statistics = measure(policy, inputs, max_tokens)
        silenced, tau_h = silence(inputs, statistics, objective.s2t, accelerator, tally, policy.device)
    active = [completion for completion in mini_batch if completion.advantage != 0]
    tokens = sum(len(completion.token_ids) for completion in mini_batch)
    masked = int(torch.cat(list(silenced.values())).sum()) if silenced else 0
    active_tokens = sum(len(completion.token_ids) for completion in active)
    counts = torch.tensor([tokens - masked, active_tokens - masked], device=policy.device)
    denominator, trained = accelerator.reduce(counts, "sum").tolist()
    if trained == 0:
        return None

    # Micro-batches: forward, loss on the sum, backward.
    for rows in split_by_tokens(active, max_tokens):
        batch = collate(rows, policy.pad_token_id, policy.device)
        now = policy.statistics(batch)
        before = now.logprobs.detach() if old is None else pad_rows([old[c].logprobs for c in rows])
        token = clipped_token_loss(now.logprobs, before, batch.advantages, objective.epsilon, objective.epsilon_high)
        keep_mask = batch.completion_mask
        if silenced:
            nothing = torch.zeros(1, dtype=torch.bool, device=policy.device)
            keep_mask = keep_mask & ~pad_rows([silenced.get(c, nothing.expand(len(c.token_ids))) for c in rows])
        loss = token.loss.where(keep_mask, 0.0).sum() / denominator
        loss.backward()
        tally.add(
            loss=loss.detach(),
            active_tokens=batch.completion_mask.sum(),
            trained_tokens=keep_mask.sum(),
            entropy=now.entropy.sum(),
            clipped_low=(token.clipped_low & keep_mask).sum(),
            clipped_high=(token.clipped_high & keep_mask).sum(),
        )
        if old is None:  # the engine sampled from this very policy: any difference is numerical
            rollout_logprobs = pad_rows([torch.tensor(c.rollout_logprobs) for c in rows]).to(policy.device)
            gap = (rollout_logprobs - now.logprobs.detach()).abs()
            tally.add(gap=gap.sum(), gap_tokens=batch.completion_mask.sum())
            tally.raise_to(gap_max=gap.max())
        on_tokens(sum(len(completion.token_ids) for completion in rows))

    # One clip, one step, the same on every process.
    if accelerator.num_processes > 1:
        sum_gradients(policy, lambda gradient: accelerator.reduce(gradient, "sum"))
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), max_grad_norm, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    return Update(float(grad_norm), tau_h)


@torch.no_grad()
def measure(policy: Policy, completions: Sequence[Completion], max_tokens: int) -> Statistics:
    """Statistics of the current policy for each completion."""
    statistics: Statistics = {}
    for rows in split_by_tokens(completions, max_tokens):
        batch = policy.statistics(collate(rows, policy.pad_token_id, policy.device))
        for row, completion in enumerate(rows):
            statistics[completion] = TokenStatistics(*(values[row, : len(completion.token_ids)] for values in batch))
    return statistics


def mask_inputs(mini_batch: Sequence[Completion], s2t: S2T) -> list[Completion]:
    """The completions whose statistics the keep-mask depends on."""
    if not s2t.enabled:
        return []
    return [c for c in mini_batch if c.advantage > 0 or s2t.population == "all"]


def silence(
    inputs: Sequence[Completion],
    statistics: Statistics,
    s2t: S2T,
    accelerator: Accelerator,
    tally: Tally,
    device: torch.device,
) -> tuple[dict[Completion, torch.Tensor], float | None]:
    """The tokens to silence ([length] bool of each of `inputs`) and tau_h, one for all processes.

    Every process takes part, with whatever it has.
    """
    lengths = [len(completion.token_ids) for completion in inputs]
    none = torch.zeros(0, device=device)
    logprobs = torch.cat([none] + [statistics[c].logprobs for c in inputs])
    entropy = torch.cat([none] + [statistics[c].entropy for c in inputs])
    advantages = torch.tensor([c.advantage for c in inputs], device=device)
    advantages = advantages.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=device))
    candidates = candidate_mask(logprobs, advantages, s2t.tau_p)
    population = entropy[candidates] if s2t.population == "candidates" else entropy
    tau_h = entropy_threshold(gather_values(population, accelerator), s2t.quantile)
    spurious = spurious_mask(candidates, entropy, tau_h)
    tally.add(candidates=candidates.sum(), silenced=spurious.sum())
    masks = dict(zip(inputs, spurious.split(lengths), strict=True))
    return masks, tau_h if math.isfinite(tau_h) else None


def learning_rate(peak: float, warmup_steps: int, updates_done: int) -> float:
    """Linear warm-up over `warmup_steps` updates, then constant."""
    return peak * min(1.0, (updates_done + 1) / max(1, warmup_steps))


def count_rollouts(tally: Tally, groups: Sequence[Sequence[Completion]]) -> None:
    completions = [completion for group in groups for completion in group]
    rewards = [c.reward for c in completions if c.reward is not None]
    tally.add(
        groups=len(groups),
        zero_variance_groups=sum(all(c.advantage == 0 for c in group) for group in groups),
        completions=len(completions),
        truncated=sum(c.truncated for c in completions),
        scored=len(rewards),
        reward=sum(rewards),
        tokens=sum(len(c.token_ids) for c in completions),
        sampled_nll=-sum(sum(c.rollout_logprobs) for c in completions),
    )


def step_metrics(
    step: int, t: dict[str, Any], updates: Sequence[Update], rate: float, clock: Sequence[float]
) -> dict[str, Any]:
    """The step's metrics as docs/metrics.md defines them; None where one has no value."""

    def ratio(numerator: float, denominator: float) -> float | None:
        return numerator / denominator if denominator else None

    thresholds = [u.tau_h for u in updates if u.tau_h is not None]
    return {
        "step": step,
        "updates": len(updates),
        "reward": ratio(t["reward"], t["scored"]),
        "zero_variance_groups": ratio(t["zero_variance_groups"], t["groups"]),
        "completion_length": ratio(t["tokens"], t["completions"]),
        "truncated_share": ratio(t["truncated"], t["completions"]),
        "sampled_nll": ratio(t["sampled_nll"], t["tokens"]),
        "entropy": ratio(t["entropy"], t["active_tokens"]),
        "candidate_share": ratio(t["candidates"], t["tokens"]),
        "silenced_share": ratio(t["silenced"], t["tokens"]),
        "tau_h": ratio(sum(thresholds), len(thresholds)),
        "clip_low_share": ratio(t["clipped_low"], t["trained_tokens"]),
        "clip_high_share": ratio(t["clipped_high"], t["trained_tokens"]),
        "loss": ratio(t["loss"], len(updates)),
        "grad_norm": ratio(sum(u.grad_norm for u in updates), len(updates)),
        "learning_rate": rate,
        "sampler_gap_mean": ratio(t["gap"], t["gap_tokens"]),
        "sampler_gap_max": t["gap_max"],
        "tokens_per_second": t["tokens"] / (clock[3] - clock[0]),
        "seconds_rollout": clock[1] - clock[0],
        "seconds_reward": clock[2] - clock[1],
        "seconds_update": clock[3] - clock[2],
        "seconds_step": clock[3] - clock[0],
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
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
    project = ProjectConfiguration(logging_dir=config.output_dir)
    on_cpu = not torch.accelerator.is_available()  # several processes on a CPU need to be told so
    accelerator = Accelerator(cpu=on_cpu, log_with=list(config.log.report_to) or None, project_config=project)
    cores = os.cpu_count() or 1
    if on_cpu and accelerator.num_processes == 1 and torch.get_num_threads() == 1 < cores:
        print(f"running on 1 of {cores} cores: accelerate launch --num_cpu_threads_per_process {cores} uses all")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise InputError(f"{launched} processes were launched, but accelerate runs {accelerator.num_processes}")
    return accelerator


def open_run_folder(config: Config, resume: bool, accelerator: Accelerator) -> Path:
    """Make the run folder and write the resolved config there.

    Raises:
        InputError: it holds a run already, or none to resume.
    """
    folder = Path(config.output_dir)
    if resume:
        checkpoint.check_same_config(checkpoint.latest_checkpoint(folder), config.model_dump())
    elif read_metrics(folder):
        fix = "continue it with --resume" if checkpoint.list_checkpoints(folder) else "delete it"
        raise InputError(f"output_dir={folder} holds a run: {fix}, or choose another folder")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        except OSError as error:
            raise InputError(f"output_dir={folder}: cannot be written ({error.strerror})") from None
    return folder


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


def make_rewards(config: Config) -> RewardModel:
    r = config.reward
    weights = [1.0] * len(r.functions) if r.weights is None else r.weights
    return RewardModel(r.functions, weights, r.correct, r.incorrect, r.timeout, r.num_workers)


def make_policy(config: Config, tokenizer: Any, device: torch.device) -> Policy:
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return load_policy(
        config.model,
        dtype=getattr(torch, config.dtype),
        quantization=config.quantization,
        lora_r=config.lora.r,
        lora_alpha=config.lora.lora_alpha,
        target_modules=list(config.lora.target_modules),
        gradient_checkpointing=config.train.gradient_checkpointing,
        temperature=config.rollout.temperature,
        pad_token_id=pad,
        lm_head_memory_bytes=int(config.train.lm_head_memory_gb * 2**30),
        device=device,
        seed=config.seed,
    )


def make_engine(name: str, config: Config, stop_tokens: tuple[int, ...]) -> RolloutEngine:
    r = config.rollout
    sampling = Sampling(r.num_generations, r.max_completion_length, r.temperature, stop_tokens)
    if name == "transformers":
        from stapo_lite.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(sampling, r.max_num_seqs)
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(
        config.model,
        sampling,
        dtype=config.dtype,
        max_model_len=config.data.max_prompt_length + r.max_completion_length,
        max_num_seqs=r.max_num_seqs,
        lora_r=config.lora.r,
        target_modules=list(config.lora.target_modules),
        gpu_memory_utilization=r.gpu_memory_utilization,
        kv_cache_gb=r.kv_cache_gb,
        quantization=r.quantization,
        sleep=r.sleep,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stapo_lite.train", description="Train a LoRA adapter with STAPO.")
    parser.add_argument("config", type=Path, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replace values of the config")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and the batch arithmetic, stop"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in output_dir")
    arguments = parser.parse_intermixed_args()
    with exit_on_input_error():
        config = load_config(arguments.config, arguments.overrides)
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        check_processes(config, processes)
        if arguments.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(f"{to_yaml(config)}\n{batch_arithmetic(config, processes)}")
            return
        for _ in train(config, arguments.resume):
            pass


if __name__ == "__main__":
    main()
