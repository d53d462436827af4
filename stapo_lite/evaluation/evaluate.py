"""Evaluation on math benchmarks: N samples of each problem, graded by rules, with confidence intervals.

An interrupted evaluation goes on where it was: finished samples are in `output_dir` and each follows from a seed of its
own. The folder ends with `samples*.jsonl`, `verdicts.jsonl`, `results.json` and `results.md`.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from stapo_lite.config import EvalConfig, Lora, flatten, to_yaml
from stapo_lite.data.prompts import stop_token_ids
from stapo_lite.errors import InputError, explained
from stapo_lite.evaluation.exam import Task, draw, judge, make_tasks, sample_key, summarise
from stapo_lite.evaluation.results import pass_table, results_table
from stapo_lite.evaluation.scores import Sample
from stapo_lite.evaluation.verifier import Verifier
from stapo_lite.files import append_lines, lock, read_lines, read_object, refuse_strangers, write_lines, write_text
from stapo_lite.model.loading import (
    adapter_digest,
    load_adapter,
    load_model_config,
    load_tokenizer,
    load_weights,
    model_digest,
    read_adapter,
)
from stapo_lite.model.processes import check_launch, resolve_dtype
from stapo_lite.rewards.grading import MathGrader
from stapo_lite.rollout import Decoding, RolloutEngine, Sampling, resolve_engine
from stapo_lite.rollout.vllm_options import check_vllm, prepare_vllm, vllm_version

# These decide which samples are drawn, or where, but not what is in one.
FREE_KEYS = (
    "output_dir", "adapter", "benchmarks", "limit", "decoding", "verifier.", "rollout.num_samples",
    "rollout.max_num_seqs", "rollout.gpu_memory_utilization", "rollout.vllm.kv_cache_memory_bytes",
    "rollout.vllm.max_num_batched_tokens", "rollout.vllm.watermark", "rollout.vllm.tensor_parallel_size",
    "rollout.vllm.cpu_offload_gb", "rollout.vllm.enforce_eager",
)  # fmt: skip


SETTINGS_FILE = "settings.json"
"""How samples are drawn; the file that an evaluation writes first."""
FILES = ("config.yaml", "samples-*.jsonl", "verdicts.jsonl", "results.json", "results.md")
"""Names of the others."""


def evaluate(config: EvalConfig) -> dict[str, Any] | None:
    """Run an evaluation, or what is left of it; returns the results, on the main process only.

    Raises:
        InputError: something in the config, the benchmarks, the model or the adapter cannot be used; `output_dir`
            holds samples that were drawn in another way, or anything but an evaluation; another one writes to it now.
        RunError: the disk is full.
    """
    # Processes may finish sampling hours apart.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    check_launch(state)
    config = config.model_copy(update={"dtype": resolve_dtype(config.dtype)})
    r, v = config.rollout, config.verifier
    engine_name = resolve_engine(r.engine)
    if engine_name == "vllm":
        prepare_vllm()
        check_vllm(r)
    elif r.quantization:
        raise InputError(f"rollout.quantization={r.quantization} needs vLLM")
    if v.model:
        load_model_config(v.model)
    adapter = read_adapter(Path(config.adapter)) if config.adapter else None
    longest = config.data.max_prompt_length + r.max_completion_length
    tokenizer, model_eos = load_tokenizer(config.model, longest, list(adapter["target_modules"]) if adapter else [])
    tasks = make_tasks(config.benchmarks, r.num_samples, config.limit, tokenizer, config.data)
    settings = sample_settings(config, engine_name)
    folder = Path(config.output_dir)
    check_folder(folder, settings)
    state.wait_for_everyone()  # all have looked, before one writes
    with lock(folder) if state.is_main_process else nullcontext():
        if state.is_main_process:
            with explained(f"output_dir={folder}: cannot be written", OSError):
                write_text(folder / SETTINGS_FILE, json.dumps(settings, indent=1))
                write_text(folder / "config.yaml", to_yaml(config, given=True))
        done = read_samples(folder)
        left = [task for task in tasks if task.key not in done]
        state.wait_for_everyone()  # before anyone appends
        if left:  # the same for every process: vLLM starts in all
            stop_tokens = stop_token_ids(tokenizer, model_eos, config.data.apply_chat_template)
            sampling = Sampling(1, longest, r.max_completion_length, r.temperature, stop_tokens)
            engine = make_engine(engine_name, config, adapter, sampling, state.device)
            draw_missing(config, engine, left, len(tasks), tokenizer, state)
            engine.sleep()  # leaves its memory to the verifier
            engine.close()
            state.wait_for_everyone()  # all samples are written
            del engine
        return grade(config, engine_name, tasks, state.device) if state.is_main_process else None


def grade(config: EvalConfig, engine_name: str, tasks: Sequence[Task], device: torch.device) -> dict[str, Any]:
    """Judge the samples in the folder, all of which are there; write and return the results."""
    r, v, folder = config.rollout, config.verifier, Path(config.output_dir)
    lines = read_samples(folder)
    verifier = Verifier(v.model, config.dtype, device, v.max_prompt_length, v.batch_size) if v.model else None
    grader = MathGrader()
    samples = judge(tasks, [lines[task.key] for task in tasks], grader, verifier)
    grader.close()
    versions = {name: version(name) for name in ("stapo-lite", "math-verify", "transformers", "torch")}
    if engine_name == "vllm":
        versions["vllm"] = str(vllm_version())
    results = config.model_dump(include={"model", "adapter", "decoding", "seed"})
    results |= r.model_dump(include={"temperature", "top_p", "max_completion_length"})
    results |= {"engine": engine_name, "verifier": v.model, "versions": versions} | summarise(tasks, samples)
    write_results(folder, tasks, samples, results)
    return results


def draw_missing(
    config: EvalConfig, engine: RolloutEngine, tasks: Sequence[Task], total: int, tokenizer: Any, state: PartialState
) -> None:
    """Draw this process's share of the samples that are missing, and append them to its file.

    Args:
        total: samples of the evaluation, of which all but `tasks` are there.

    Raises:
        RunError: the disk is full.
    """
    folder = Path(config.output_dir)
    (folder / "results.json").unlink(missing_ok=True)  # of fewer samples
    path = folder / f"samples-{state.process_index}.jsonl"
    write_lines(path, read_lines(path))  # without a line that was cut off
    r, quiet = config.rollout, None if state.is_main_process else True
    decoding = Decoding(r.max_completion_length, r.temperature, r.top_p)
    mine, begun = tasks[state.process_index :: state.num_processes], total - len(tasks)
    with tqdm(total=total, initial=begun, desc="sample", unit="sample", disable=quiet, smoothing=0) as bar:
        for line in draw(engine, mine, decoding, config.seed, tokenizer):
            append_lines(path, [line])
            bar.update(state.num_processes)


def sample_settings(config: EvalConfig, engine: str) -> dict[str, Any]:
    """What a sample depends on, besides its problem and its number.

    Raises:
        InputError: the adapter cannot be read.
    """
    settings = {k: v for k, v in flatten(config.model_dump(mode="json")).items() if not k.startswith(FREE_KEYS)}
    settings["rollout.engine"] = engine
    if config.adapter:
        settings["adapter (its files)"] = adapter_digest(Path(config.adapter))
    if digest := model_digest(config.model):
        settings["model (its files)"] = digest
    return settings


def check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Check that an evaluation may begin, or go on, in a folder.

    Raises:
        InputError: it holds samples that were drawn in another way, or something that is not an evaluation's.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        refuse_strangers(folder, FILES)
        return
    before = read_object(path)
    for key in sorted(before.keys() | settings.keys()):
        if before.get(key) != settings.get(key):
            raise InputError(
                f"output_dir={folder} holds samples drawn with {key}={before.get(key)}, not {settings.get(key)}: "
                "choose another folder, or delete it"
            )


def read_samples(folder: Path) -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """The finished samples by `Task.key`."""
    lines = [line for path in sorted(folder.glob("samples-*.jsonl")) for line in read_lines(path)]
    return {sample_key(line): line for line in lines}


def make_engine(
    name: str, config: EvalConfig, adapter: dict[str, Any] | None, sampling: Sampling, device: torch.device
) -> RolloutEngine:
    """An engine that serves the model, with the adapter if there is one.

    Raises:
        InputError: the engine does not start, or the adapter has values for other layers, or none for some.
    """
    if name == "vllm":
        from stapo_lite.rollout.vllm_engine import VLLMEngine

        # Unchecked: it may have layers that training here does not offer.
        lora = Lora.model_construct(r=adapter["r"], target_modules=adapter["target_modules"]) if adapter else None
        sleep_level = 2 if config.verifier.model else 0  # never woken
        vllm = VLLMEngine(config.model, config.dtype, sampling, config.rollout, lora, sleep_level)
        if config.adapter:
            vllm.load_adapter(Path(config.adapter), version=0)
        return vllm
    from stapo_lite.rollout.transformers_engine import TransformersEngine

    engine = TransformersEngine(sampling, config.rollout.max_num_seqs)
    model = load_weights(config.model, config.dtype, device)
    if config.adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig.from_pretrained(config.adapter))
        load_adapter(model, Path(config.adapter))
    served: Any = SimpleNamespace(model=model)  # all of a policy that this engine looks at
    engine.publish(served, version=0)
    return engine


def write_results(folder: Path, tasks: Sequence[Task], samples: Sequence[Sample], results: dict[str, Any]) -> None:
    """`verdicts.jsonl`, `results.json` and `results.md`."""
    write_lines(
        folder / "verdicts.jsonl",
        (
            {"benchmark": task.key[0], "id": task.key[1], "sample": task.key[2], "gold": task.problem.gold}
            | {"answer": sample.answer, "correct": sample.correct}
            | ({} if sample.accepted is None else {"accepted_by_verifier": sample.accepted})
            for task, sample in zip(tasks, samples, strict=True)
        ),
    )
    write_text(folder / "results.json", json.dumps(results, indent=1))
    adapter = f" with {results['adapter']}" if results["adapter"] else ""
    decoding = f"temperature {results['temperature']}, top-p {results['top_p']}"
    head = f"In per cent, at {decoding}, at most {results['max_completion_length']} tokens; intervals by bootstrap."
    document = f"# {results['model']}{adapter}\n\n{head}\n\n{results_table(results)}\n\n{pass_table(results)}\n"
    write_text(folder / "results.md", document)
