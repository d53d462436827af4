"""Evaluation on math benchmarks: N samples of each problem, graded by rules, with confidence intervals.

    accelerate launch -m stapo_lite.evaluate configs/eval.yaml model=... adapter=... [key.sub=value ...]
    python -m stapo_lite.evaluate compare runs/eval-a runs/eval-b

An interrupted evaluation goes on where it was: finished samples are in `output_dir` and each follows from a seed of its
own. The folder ends with `samples*.jsonl`, `verdicts.jsonl`, `results.json` and `results.md`.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from stapo_lite import data
from stapo_lite.checkpoint import flatten
from stapo_lite.config import (
    Config,
    EvalConfig,
    InputError,
    Lora,
    RunError,
    Train,
    check_launched,
    load_eval_config,
    one_line_errors,
    to_yaml,
)
from stapo_lite.exam import Task, draw, judge, make_tasks, sample_key, summarise
from stapo_lite.files import Journal, read_lines, read_object, write_lines, write_text
from stapo_lite.grading import MathGrader
from stapo_lite.lifecycle import warn_of_unused_card
from stapo_lite.policy import load_model_config, load_policy, load_tokenizer, padding_token
from stapo_lite.rollout import Decoding, RolloutEngine, Sampling, check_vllm, resolve_engine, vllm_version
from stapo_lite.scores import Sample, comparison_table, pass_table, results_table
from stapo_lite.verifier import Verifier

# These decide which samples are drawn, or where, but not what is in one.
FREE_KEYS = (
    "output_dir", "adapter", "benchmarks", "limit", "decoding", "grading.", "verifier.", "rollout.num_samples",
    "rollout.max_num_seqs", "rollout.gpu_memory_utilization", "rollout.kv_cache_gb",
)  # fmt: skip
SPECIAL_ADAPTERS = (
    "use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters",
    "trainable_token_indices",
)  # fmt: skip


def evaluate(config: EvalConfig) -> dict[str, Any] | None:
    """Run an evaluation, or what is left of it; returns the results, on the main process only.

    Raises:
        InputError: something in the config, the benchmarks, the model or the adapter cannot be used, or `output_dir`
            holds samples that were drawn in another way.
    """
    # Processes may finish sampling hours apart.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    check_launched(state.num_processes)
    if state.is_main_process:
        warn_of_unused_card()
    r = config.rollout
    engine_name = resolve_engine(r.engine)
    if engine_name == "vllm":
        check_vllm(r.quantization, sleep_level=0)
    elif r.quantization:
        raise InputError(f"rollout.quantization={r.quantization} needs vLLM")
    if config.verifier.model:
        load_model_config(config.verifier.model)
    adapter = read_adapter(config.adapter)
    modules = list(adapter["target_modules"]) if adapter else []
    longest = config.data.max_prompt_length + r.max_completion_length
    tokenizer, model_eos = load_tokenizer(config.model, longest, modules)
    tasks = make_tasks(config.benchmarks, r.num_samples, config.limit, tokenizer, config.data)
    folder = open_folder(config, engine_name, state)
    lines = read_samples(folder)
    left = [task for task in tasks if task.key not in lines]
    state.wait_for_everyone()  # before anyone appends
    if left:  # the same for every process: vLLM starts in all of them
        stop_tokens = data.stop_token_ids(tokenizer, model_eos, config.data.apply_chat_template)
        engine = make_engine(engine_name, config, adapter, tokenizer, stop_tokens, state.device)
        decoding = Decoding(r.max_completion_length, r.temperature, r.top_p)
        (folder / "results.json").unlink(missing_ok=True)  # of fewer samples
        path = folder / f"samples-{state.process_index}.jsonl"
        write_lines(path, read_lines(path))  # without a line that was cut off
        samples_file = Journal(path)
        mine = left[state.process_index :: state.num_processes]
        bar = tqdm(
            total=len(tasks), initial=len(lines.keys() & {task.key for task in tasks}), desc="sample", unit="sample",
            disable=None if state.is_main_process else True, smoothing=0,
        )  # fmt: skip
        with bar:
            for line in draw(engine, mine, decoding, config.seed, tokenizer):
                samples_file.add([line])
                bar.update(state.num_processes)
        try:
            samples_file.flush()
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}); make room and start again") from None
        engine.sleep()  # leaves its memory to the verifier
        state.wait_for_everyone()  # before vLLM may end the process group
        engine.close()
        del engine
    if not state.is_main_process:
        return None
    lines = read_samples(folder)
    verifier = None
    v = config.verifier
    if v.model:
        verifier = Verifier(v.model, getattr(torch, config.dtype), state.device, v.max_prompt_length, v.batch_size)
    grader = MathGrader(config.grading.timeout, config.grading.num_workers)
    samples = judge(tasks, [lines[task.key] for task in tasks], grader, verifier)
    grader.close()
    results = {
        "model": config.model,
        "adapter": config.adapter,
        "engine": engine_name,
        "decoding": config.decoding,
        "temperature": r.temperature,
        "top_p": r.top_p,
        "max_completion_length": r.max_completion_length,
        "seed": config.seed,
        "verifier": config.verifier.model,
        "versions": {name: version(name) for name in ("stapo-lite", "math-verify", "transformers", "torch")}
        | ({"vllm": str(vllm_version())} if engine_name == "vllm" else {}),
        **summarise(tasks, samples),
    }
    write_results(folder, tasks, samples, results)
    return results


def read_adapter(folder: str | None) -> dict[str, Any] | None:
    """PEFT's config of an adapter; None without a folder.

    Raises:
        InputError: there is no adapter, or not one that both engines apply as it was trained.
    """
    if folder is None:
        return None
    try:
        adapter = read_object(Path(folder) / "adapter_config.json")
    except InputError as error:
        raise InputError(f"adapter={folder}: no adapter in PEFT's format ({error})") from None
    special = [key for key in SPECIAL_ADAPTERS if adapter.get(key)]
    if adapter.get("peft_type") != "LORA" or special:
        kind = ", ".join(special) or adapter.get("peft_type")
        raise InputError(f"adapter={folder}: not a plain LoRA adapter ({kind})")
    modules = adapter.get("target_modules")
    if not isinstance(modules, list) or any("." in name for name in modules):
        raise InputError(f"adapter={folder}: its target_modules must be a list of layer names, got {modules}")
    if not isinstance(adapter.get("r"), int) or not 1 <= adapter["r"] <= 512:
        raise InputError(f"adapter={folder}: its rank must be at most 512, got {adapter.get('r')!r}")
    return adapter


def open_folder(config: EvalConfig, engine: str, state: PartialState) -> Path:
    """Make the folder and note how samples are drawn.

    Raises:
        InputError: it holds samples that were drawn in another way, or cannot be written.
    """
    folder = Path(config.output_dir)
    settings = {k: v for k, v in flatten(config.model_dump(mode="json")).items() if not k.startswith(FREE_KEYS)}
    settings["rollout.engine"] = engine
    if config.adapter:
        digest = hashlib.sha256()
        try:
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                digest.update(Path(config.adapter, name).read_bytes())
        except OSError as error:
            raise InputError(f"adapter={config.adapter}: {error.filename} cannot be read ({error.strerror})") from None
        settings["adapter (its files)"] = digest.hexdigest()
    path = folder / "settings.json"
    if path.exists():
        before = read_object(path)
        for key in sorted(before.keys() | settings.keys()):
            if before.get(key) != settings.get(key):
                raise InputError(
                    f"output_dir={folder} holds samples drawn with {key}={before.get(key)}, not {settings.get(key)}: "
                    "choose another folder, or delete it"
                )
    state.wait_for_everyone()
    if state.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(settings, indent=1))
            write_text(folder / "config.yaml", to_yaml(config))
        except OSError as error:
            raise InputError(f"output_dir={folder}: cannot be written ({error.strerror})") from None
    return folder


def read_samples(folder: Path) -> dict[tuple[str, str, int, str], dict[str, Any]]:
    """The finished samples by `Task.key`."""
    lines = [line for path in sorted(folder.glob("samples-*.jsonl")) for line in read_lines(path)]
    return {sample_key(line): line for line in lines}


def make_engine(
    name: str,
    config: EvalConfig,
    adapter: dict[str, Any] | None,
    tokenizer: Any,
    stop_tokens: tuple[int, ...],
    device: torch.device,
) -> RolloutEngine:
    """An engine that serves the model, with the adapter if there is one."""
    r = config.rollout
    sampling = Sampling(1, config.data.max_prompt_length, r.max_completion_length, r.temperature, stop_tokens)
    lora = None
    if adapter:  # which may have layers that training here does not offer
        lora = Lora.model_construct(
            r=adapter["r"], lora_alpha=adapter.get("lora_alpha", 8), target_modules=adapter["target_modules"]
        )
    if name == "vllm":
        from stapo_lite.rollout.vllm_engine import VLLMEngine

        sleep_level = 2 if config.verifier.model else 0  # never woken
        vllm = VLLMEngine(config.model, config.dtype, sampling, r, lora, sleep_level)
        if config.adapter:
            vllm.load_adapter(Path(config.adapter), version=0)
        return vllm
    from stapo_lite.rollout.transformers_engine import TransformersEngine

    run = Config(model=config.model, output_dir=config.output_dir, dtype=config.dtype)
    untouched = Lora(r=1, target_modules=["q_proj"])  # a new adapter changes nothing until one is loaded
    run = run.model_copy(update={"lora": lora or untouched, "train": Train(gradient_checkpointing=False)})
    policy = load_policy(run, padding_token(tokenizer), device)
    if config.adapter:
        policy.load_adapter(Path(config.adapter))
    engine = TransformersEngine(sampling, r.max_num_seqs)
    engine.publish(policy, version=0)
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


def compare(folders: Sequence[Path]) -> str:
    """Runs side by side as Markdown.

    Raises:
        InputError: there are fewer than two folders; one holds no results; they have no benchmark in common.
    """
    if len(set(folders)) < 2:
        raise InputError("compare: give the output_dir of two evaluations or more")
    runs = {}
    for folder in folders:
        try:
            runs[str(folder)] = read_object(folder / "results.json")
        except InputError as error:
            raise InputError(f"{folder}: no results of an evaluation ({error})") from None
    table = comparison_table(runs)
    if table is None:
        raise InputError("the runs have no benchmark with the same problems in common")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stapo_lite.evaluate", description="Evaluate on math benchmarks.")
    parser.add_argument("config", help="YAML file, see configs/eval.yaml; or `compare`")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="replace values of the config; or folders"
    )
    arguments = parser.parse_intermixed_args()
    with one_line_errors():
        if arguments.config == "compare":
            print(compare([Path(folder) for folder in arguments.overrides]))
            return
        config = load_eval_config(arguments.config, arguments.overrides)
        try:
            results = evaluate(config)
        except KeyboardInterrupt:
            raise SystemExit(f"\ninterrupted; the same command goes on with what is in {config.output_dir}") from None
        PartialState().destroy_process_group()  # its threads, still running at exit, may abort a process
        if results is not None:
            print(f"{results_table(results)}\n\n{pass_table(results)}\n\nresults: {config.output_dir}")


if __name__ == "__main__":
    main()
