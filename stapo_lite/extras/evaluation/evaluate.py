"""Evaluation on math benchmarks: N samples of each problem, graded by rules, with confidence
intervals.

An interrupted evaluation continues where it stopped, since finished samples are in `output_dir` and
each sample has its own seed. A finished evaluation leaves `samples-*.jsonl`, `verdicts.jsonl`,
`results.json` and `results.md`.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState

from stapo_lite.config import EvalConfig, to_yaml
from stapo_lite.data.messages import stop_token_ids
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.results import results_page
from stapo_lite.extras.evaluation.samples import Task, benchmark_tasks, draw, grade, sample_line
from stapo_lite.extras.evaluation.scores import summarise
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.files import append_lines, check_new, lock, read_lines, write_lines, write_text
from stapo_lite.model.adapter import public_name, read_fitting_adapter
from stapo_lite.model.loading import load_weights
from stapo_lite.model.processes import check_launch, resolve_dtype
from stapo_lite.model.tokenizer import load_tokenizer
from stapo_lite.rollout.engine import Decoding, RolloutEngine, RolloutSettings
from stapo_lite.rollout.make import check_options, resolve_engine
from stapo_lite.training.lifecycle import environment

logger = logging.getLogger(__name__)

VERDICT = ("benchmark", "id", "sample", "gold", "answer", "correct")
"""The fields of a sample in `verdicts.jsonl`."""


def evaluate(config: EvalConfig) -> dict[str, Any] | None:
    """Run or continue an evaluation; return the results on the main process, None elsewhere.

    Collective: every rank must call it.

    Raises:
        InputError: something in the config, the benchmarks, the model or the adapter cannot be
            used; `output_dir` holds another evaluation, or anything else; another process is
            writing to it.
        RunError: the disk is full.
    """
    # 1. Check all that needs no weights. Processes may finish sampling hours apart.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    check_launch(state)
    dtype = resolve_dtype(config.dtype, config.rollout.quantization)
    config = config.model_copy(update={"dtype": dtype})
    engine_name = resolve_engine(config.rollout.engine)
    check_options(engine_name, config.rollout, dtype)
    lora = None
    if config.adapter:
        lora = read_fitting_adapter(Path(config.adapter), config.model)
        base = lora.base_model_name_or_path
        if public_name(base) != public_name(config.model):
            logger.warning("adapter=%s was trained on %s", config.adapter, base)
    tokenizer, model_eos = load_tokenizer(config.model)
    tasks = benchmark_tasks(
        config, tokenizer, config.benchmarks, config.rollout.num_samples, config.limit
    )
    with open_folder(config) if state.is_main_process else nullcontext():
        # 2. Draw the samples that an earlier start has not drawn.
        samples = read_samples(config)
        missing = [task for task in tasks if task.seed not in samples]
        state.wait_for_everyone()  # all have read the samples, before one appends
        if missing:  # the same for every process: vLLM starts in all
            stops = stop_token_ids(tokenizer, model_eos, config.data.apply_chat_template)
            engine = open_evaluation_engine(engine_name, config, lora, stops, state.device)
            with closing(engine):
                share = missing[state.process_index :: state.num_processes]
                draw_samples(config, engine, share, tokenizer, state.process_index)
            state.wait_for_everyone()  # all samples are written
        # 3. Judge all samples.
        if state.is_main_process:
            return finish(config, engine_name, tasks)
    return None


def open_folder(config: EvalConfig) -> AbstractContextManager:
    """Lock the folder of an evaluation that begins or continues.

    Raises:
        InputError: the folder holds something else, or an evaluation with another config or
            adapter; or another process has locked it.
    """
    folder = Path(config.output_dir)
    text = to_yaml(config, given=True)
    if config.adapter:  # a run that goes on writes another adapter under the same path
        weights = Path(config.adapter, "adapter_model.safetensors").read_bytes()
        text += f"# adapter: {sha256(weights).hexdigest()}\n"
    path = folder / "config.yaml"
    if not path.exists():
        check_new(folder)
    elif path.read_text(encoding="utf-8") != text:
        raise InputError(f"output_dir={folder} holds samples of another config or adapter")
    folder_lock = lock(folder)
    write_text(path, text)
    return folder_lock


def read_samples(config: EvalConfig) -> dict[int, dict[str, Any]]:
    """The finished samples, of all processes, by their seeds."""
    paths = sorted(Path(config.output_dir).glob("samples-*.jsonl"))
    return {line["seed"]: line for path in paths for line in read_lines(path)}


def open_evaluation_engine(
    name: str, config: EvalConfig, lora: Any | None, stops: tuple[int, ...], device: torch.device
) -> RolloutEngine:
    """Start an engine with the model, and with the adapter if there is one.

    Args:
        lora: PEFT's config of the adapter.
        stops: tokens that end a completion.

    Raises:
        InputError: the engine does not start, or cannot serve the adapter.
    """
    rollout = config.rollout
    longest = rollout.max_completion_length
    whole = config.data.max_prompt_length + longest
    sampling = RolloutSettings(1, whole, longest, rollout.temperature, stops)
    if name == "vllm":
        from stapo_lite.rollout.vllm_engine import VLLMEngine

        vllm = VLLMEngine(config.model, config.dtype, sampling, rollout, lora)
        if config.adapter:
            vllm.load_adapter(Path(config.adapter), version=0)
        return vllm
    engine = TransformersEngine(sampling, rollout.max_num_seqs)
    model = load_weights(config.model, config.dtype, device)
    if config.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, config.adapter)
    policy: Any = SimpleNamespace(model=model)  # all that the engine needs of a policy
    engine.publish(policy, version=0)
    return engine


def draw_samples(
    config: EvalConfig, engine: RolloutEngine, tasks: Sequence[Task], tokenizer: Any, process: int
) -> None:
    """Draw this process's share of the missing samples and append them to its own file.

    Raises:
        RunError: the disk is full.
    """
    path = Path(config.output_dir) / f"samples-{process}.jsonl"
    write_lines(path, read_lines(path))  # drops a line that an interruption cut off
    rollout = config.rollout
    decoding = Decoding(rollout.max_completion_length, rollout.temperature, rollout.top_p)
    for index, completion in draw(engine, tasks, decoding, tokenizer):
        append_lines(path, [sample_line(tasks[index], completion)])


def finish(config: EvalConfig, engine_name: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """Judge the samples in the folder, which has all of them; write and return the results."""
    folder = Path(config.output_dir)
    samples = grade(tasks, read_samples(config))
    results = {
        **config.model_dump(include={"model", "adapter", "decoding", "seed"}),
        **config.rollout.model_dump(include={"temperature", "top_p", "max_completion_length"}),
        "environment": environment(engine_name, PartialState().num_processes),
        **summarise(samples),
    }
    verdicts = ({key: sample[key] for key in VERDICT} for sample in samples)
    write_lines(folder / "verdicts.jsonl", verdicts)
    write_text(folder / "results.json", json.dumps(results, indent=1))
    write_text(folder / "results.md", results_page(results))
    return results
