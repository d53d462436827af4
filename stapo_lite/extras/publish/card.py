"""The model card of a run's adapter: the README of its repository, with the Hub's metadata."""

from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData

from stapo_lite.config import IN_PYTHON, Config, load_config, to_yaml
from stapo_lite.data.rows import names_file
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.results import results_table
from stapo_lite.files import read_lines, read_object
from stapo_lite.model.adapter import public_name
from stapo_lite.model.loading import load_model_config, model_class
from stapo_lite.rollout.vllm_options import served_rank
from stapo_lite.training.folder import ENVIRONMENT_FILE, EVALUATIONS_FILE, read_metrics


class FinishedRun(NamedTuple):
    """A run folder's record of its adapter."""

    config: Config
    adapter: Path
    metrics: list[dict[str, Any]]
    """One entry per step, up to the adapter's step."""
    results: dict[str, Any] | None
    """The adapter's evaluation, if there was one."""
    environment: dict[str, Any]


def read_run(folder: Path, evaluation: str | Path | None) -> FinishedRun:
    """Read the folder of a run that has ended.

    Args:
        evaluation: folder of an evaluation to take the results from; None for the run's own.

    Raises:
        InputError: the folder holds no run with an adapter; the evaluation has no results, or is of
            the base.
    """
    config = load_config(folder / "config.yaml")
    adapter = folder / "adapter"
    if not (adapter / "adapter_config.json").exists():  # the file that is written last
        raise InputError(f"{folder}: the run has not ended; --resume it")
    metrics = read_metrics(folder)
    results = None
    if evaluation:
        results = read_object(Path(evaluation) / "results.json")
        if results["model"] == config.model and not results["adapter"]:
            raise InputError(f"--evaluation={evaluation}: of the base, without the adapter")
    else:
        for line in read_lines(folder / EVALUATIONS_FILE):
            if line["step"] == metrics[-1]["step"]:
                results = line
    return FinishedRun(config, adapter, metrics, results, read_object(folder / ENVIRONMENT_FILE))


def model_card(name: str, run: FinishedRun, base: str, merged: bool, stops: tuple[int, ...]) -> str:
    """The README of the repository. Local files and folders appear without their paths.

    Args:
        name: repository or folder.
        stops: tokens that ended a completion.
    """
    config = run.config
    data = config.data
    start = config.lora.adapter
    teacher = config.objective.teacher_adapter
    public = {"teacher_server": None, "teacher_adapter": teacher and public_name(teacher)}
    # The metadata may name a data set or a base only if the Hub has it.
    path = Path(data.source)
    local = path.is_absolute() or path.exists() or ":" in data.source or names_file(data.source)
    datasets = None
    source = path.name
    if not local and data.source != IN_PYTHON:
        datasets = [data.source]
        source = " ".join(filter(None, [data.source, data.subset, data.split]))
    table = ""
    if run.results and "benchmarks" in run.results:
        table = results_table(run.results)
    metadata = ModelCardData(
        base_model=None if Path(base).exists() else base,
        datasets=datasets,
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        tags=["stapo_lite", config.algorithm, "reinforcement-learning", "lora"],
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("model_card.md")),
        name=name,
        base=public_name(base),
        auto=model_class(load_model_config(base)).__name__,
        start=start and public_name(start),
        data=source,
        merged=merged,
        run=run,
        config=config,
        fields=to_yaml(config.objective.model_copy(update=public)).strip(),
        table=table,
        served_rank=served_rank(config.lora.r),
        stops=list(stops),
    )
    return str(card)
