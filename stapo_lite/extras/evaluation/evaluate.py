"""Evaluation on math benchmarks: N samples of each problem, graded by rules, with confidence
intervals.

An interrupted evaluation continues where it stopped: finished samples are in `output_dir`, and each
sample has its own seed. A finished one leaves `samples-*.jsonl`, `verdicts.jsonl`, `results.json`
and `results.md`.
"""

import json
from collections.abc import Sequence
from contextlib import closing, nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState

from stapo_lite.config import EvalConfig, Lora, flatten, to_yaml
from stapo_lite.data.prompts import stop_token_ids
from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.extras.evaluation.results import pass_table, results_table
from stapo_lite.extras.evaluation.scores import Sample
from stapo_lite.extras.evaluation.tasks import Task, draw, judge, make_tasks, sample_key, summarise
from stapo_lite.extras.evaluation.verifier import ModelVerifier
from stapo_lite.extras.math.grading import MathGrader
from stapo_lite.files import (
    append_lines,
    check_nothing_overwritten,
    lock,
    read_lines,
    read_object,
    write_lines,
    write_text,
)
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
from stapo_lite.rollout import (
    Decoding,
    RolloutEngine,
    RolloutSettings,
    progress_bar,
    resolve_engine,
)
from stapo_lite.rollout.vllm_options import check_vllm, prepare_vllm, vllm_version

SETTINGS_FILE = "settings.json"
"""Records what the samples depend on; an evaluation writes it first."""
FILES = ("config.yaml", "samples-*.jsonl", "verdicts.jsonl", "results.json", "results.md")
"""The other files of an evaluation."""
FREE_KEYS = (
    "output_dir",
    "adapter",
    "benchmarks",
    "limit",
    "decoding",
    "verifier.",
    "rollout.num_samples",
    "rollout.max_num_seqs",
    "rollout.gpu_memory_utilization",
    "rollout.vllm.kv_cache_memory_bytes",
    "rollout.vllm.max_num_batched_tokens",
    "rollout.vllm.watermark",
    "rollout.vllm.tensor_parallel_size",
    "rollout.vllm.cpu_offload_gb",
    "rollout.vllm.enforce_eager",
)
"""Keys and sections that may differ between samples in one folder: they decide which samples are
drawn or on what hardware, not what is in one. The adapter is compared by its files."""


def evaluate(config: EvalConfig) -> dict[str, Any] | None:
    """Run or continue an evaluation; return the results on the main process, None elsewhere.

    Collective: every rank must call it.

    Raises:
        InputError: something in the config, the benchmarks, the model or the adapter cannot be
            used; `output_dir` holds samples drawn with other settings, or files that would be
            overwritten; another evaluation is writing to it.
        RunError: the disk is full.
    """
    # Processes may finish sampling hours apart.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    check_launch(state)
    dtype = resolve_dtype(config.dtype, config.rollout.quantization)
    config = config.model_copy(update={"dtype": dtype})
    engine_name = check_models(config)
    lora = read_lora(config.adapter) if config.adapter else None
    longest = config.data.max_prompt_length + config.rollout.max_completion_length
    layers = lora.target_modules if lora else []
    tokenizer, model_eos = load_tokenizer(config.model, longest, layers)
    num_samples = config.rollout.num_samples
    tasks = make_tasks(config.benchmarks, num_samples, config.limit, tokenizer, config.data)
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
        missing = [task for task in tasks if task.key not in done]
        state.wait_for_everyone()  # all have read the samples, before one appends
        if missing:  # the same for every process: vLLM starts in all
            stops = stop_token_ids(tokenizer, model_eos, config.data.apply_chat_template)
            share = missing[state.process_index :: state.num_processes]
            with closing(start_engine(engine_name, config, lora, stops, state.device)) as engine:
                draw_samples(config, engine, share, tokenizer, state.process_index)
            del engine
            state.wait_for_everyone()  # all samples are written
        if state.is_main_process:
            return grade_samples(config, engine_name, tasks, state.device)
    return None


def check_models(config: EvalConfig) -> str:
    """Check engine and verifier before anything slow begins; return the engine's name.

    Raises:
        InputError: vLLM is needed but missing, or refuses an option; the verifier is not a language
            model.
    """
    engine_name = resolve_engine(config.rollout.engine)
    if engine_name == "vllm":
        prepare_vllm()
        check_vllm(config.rollout, config.dtype)
    elif config.rollout.quantization:
        raise InputError(f"rollout.quantization={config.rollout.quantization} needs vLLM")
    if config.verifier.model:
        load_model_config(config.verifier.model)
    return engine_name


def read_lora(adapter: str) -> Lora:
    """Rank and layers of an adapter, not validated: training here may not support its layers.

    Raises:
        InputError: it is not a plain LoRA adapter in PEFT's format.
    """
    fields = read_adapter(Path(adapter))
    return Lora.model_construct(r=fields["r"], target_modules=fields["target_modules"])


def sample_settings(config: EvalConfig, engine: str) -> dict[str, Any]:
    """What a sample depends on besides its problem and number.

    Raises:
        InputError: the adapter cannot be read.
    """
    settings: dict[str, Any] = {}
    for key, value in flatten(config.model_dump(mode="json")).items():
        if not key.startswith(FREE_KEYS):
            settings[key] = value
    settings["rollout.engine"] = engine
    if config.adapter:
        settings["adapter (its files)"] = adapter_digest(Path(config.adapter))
    if digest := model_digest(config.model):
        settings["model (its files)"] = digest
    return settings


def check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Check that an evaluation may begin, or continue, in a folder.

    Raises:
        InputError: it holds samples drawn with other settings, or files that would be overwritten.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        check_nothing_overwritten(folder, FILES)
        return
    before = read_object(path)
    for key in sorted(before.keys() | settings.keys()):
        old, new = before.get(key), settings.get(key)
        if old != new:
            raise InputError(
                f"output_dir={folder} holds samples drawn with {key}={old}, not {new}: choose "
                "another folder, or delete it"
            )


def read_samples(folder: Path) -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """The finished samples by `Task.key`."""
    samples = {}
    for path in sorted(folder.glob("samples-*.jsonl")):
        for line in read_lines(path):
            samples[sample_key(line)] = line
    return samples


def start_engine(
    name: str,
    config: EvalConfig,
    lora: Lora | None,
    stops: tuple[int, ...],
    device: torch.device,
) -> RolloutEngine:
    """Start an engine with the model, and with the adapter if there is one.

    Args:
        stops: tokens that end a completion.

    Raises:
        InputError: the engine does not start, or the adapter's tensors do not match its layers.
    """
    rollout, longest = config.rollout, config.rollout.max_completion_length
    whole = config.data.max_prompt_length + longest
    sampling = RolloutSettings(1, whole, longest, rollout.temperature, stops)
    if name == "vllm":
        from stapo_lite.rollout.vllm_engine import VLLMEngine

        vllm = VLLMEngine(config.model, config.dtype, sampling, rollout, lora, sleep_level=0)
        if config.adapter:
            vllm.load_adapter(Path(config.adapter), version=0)
        return vllm
    from stapo_lite.rollout.transformers_engine import TransformersEngine

    engine = TransformersEngine(sampling, rollout.max_num_seqs)
    model = load_weights(config.model, config.dtype, device)
    if config.adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig.from_pretrained(config.adapter))
        load_adapter(model, Path(config.adapter))
    policy: Any = SimpleNamespace(model=model)  # all that this engine needs of a policy
    engine.publish(policy, version=0)
    return engine


def draw_samples(
    config: EvalConfig, engine: RolloutEngine, tasks: Sequence[Task], tokenizer: Any, process: int
) -> None:
    """Draw this process's share of the missing samples and append them to its file.

    Raises:
        RunError: the disk is full.
    """
    folder = Path(config.output_dir)
    (folder / "results.json").unlink(missing_ok=True)  # it covers fewer samples
    path = folder / f"samples-{process}.jsonl"
    write_lines(path, read_lines(path))  # drops a line that was cut off
    rollout = config.rollout
    decoding = Decoding(rollout.max_completion_length, rollout.temperature, rollout.top_p)
    lines = draw(engine, tasks, decoding, config.seed, tokenizer)
    for line in progress_bar("evaluate", "sample", len(tasks), lines):
        append_lines(path, [line])


def grade_samples(
    config: EvalConfig, engine_name: str, tasks: Sequence[Task], device: torch.device
) -> dict[str, Any]:
    """Judge the samples in the folder, which has all of them; write and return the results."""
    folder = Path(config.output_dir)
    lines = read_samples(folder)
    verifier = ModelVerifier(config, device) if config.verifier.model else None
    with closing(MathGrader()) as grader:
        samples = judge(tasks, [lines[task.key] for task in tasks], grader, verifier)
    packages = ("stapo-lite", "math-verify", "transformers", "torch")
    versions = {name: version(name) for name in packages}
    if engine_name == "vllm":
        versions["vllm"] = str(vllm_version())
    results = config.model_dump(include={"model", "adapter", "decoding", "seed"})
    results |= config.rollout.model_dump(include={"temperature", "top_p", "max_completion_length"})
    results |= {"engine": engine_name, "verifier": config.verifier.model, "versions": versions}
    results |= summarise(tasks, samples)
    with explained(f"output_dir={folder}: cannot be written", OSError, kind=RunError):
        write_results(folder, tasks, samples, results)
    return results


def write_results(
    folder: Path, tasks: Sequence[Task], samples: Sequence[Sample], results: dict[str, Any]
) -> None:
    """Write `verdicts.jsonl`, `results.json` and `results.md`."""
    verdicts = []
    for task, sample in zip(tasks, samples, strict=True):
        verdict = {
            "benchmark": task.problem.benchmark,
            "id": task.problem.id,
            "sample": task.number,
            "gold": task.problem.gold,
            "answer": sample.answer,
            "correct": sample.correct,
        }
        if sample.accepted is not None:
            verdict["accepted_by_verifier"] = sample.accepted
        verdicts.append(verdict)
    write_lines(folder / "verdicts.jsonl", verdicts)
    write_text(folder / "results.json", json.dumps(results, indent=1))
    adapter = f" with {results['adapter']}" if results["adapter"] else ""
    parts = [
        f"# {results['model']}{adapter}",
        f"In per cent, at temperature {results['temperature']}, top-p {results['top_p']}, at most "
        f"{results['max_completion_length']} tokens; intervals by bootstrap.",
        results_table(results),
        pass_table(results),
    ]
    write_text(folder / "results.md", "\n\n".join(parts) + "\n")
