"""The model card of a run's adapter: the README of its repository, with the Hub's metadata."""

from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData

from stapo_lite.config import IN_PYTHON, Config, Objective, load_config, to_yaml
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.results import results_table
from stapo_lite.files import read_lines, read_object
from stapo_lite.rollout.vllm_options import served_rank
from stapo_lite.training.checkpoint import newest_checkpoint, read_state
from stapo_lite.training.folder import ENVIRONMENT_FILE, EVALUATIONS_FILE, run_metrics


class FinishedRun(NamedTuple):
    """What a run folder says about the adapter in it."""

    config: Config
    adapter: Path
    metrics: list[dict[str, Any]]
    """One entry per step, up to the adapter's step."""
    results: dict[str, Any] | None
    """The adapter's evaluation, if there was one."""
    environment: dict[str, Any]


def read_run(folder: Path, evaluation: str | Path | None) -> FinishedRun:
    """Read a run folder. If the run has not ended, take the adapter of its newest checkpoint.

    Args:
        evaluation: folder of an evaluation to take the results from; None for the run's own.

    Raises:
        InputError: the folder holds no run with an adapter; the evaluation has no results.
    """
    config, metrics = load_config(folder / "config.yaml"), run_metrics(folder)
    adapter, step = folder / "adapter", metrics[-1]["step"]
    if not (adapter / "adapter_config.json").exists():  # the file that is written last
        checkpoint = newest_checkpoint(folder)
        if checkpoint is None:
            raise InputError(f"{folder}: no adapter and no checkpoint yet")
        adapter, step = checkpoint, read_state(checkpoint)["progress"]["step"]
    results = [line for line in read_lines(folder / EVALUATIONS_FILE) if line["step"] == step]
    if evaluation:
        results = [read_object(Path(evaluation) / "results.json")]
    metrics = [line for line in metrics if line["step"] <= step]
    environment = read_object(folder / ENVIRONMENT_FILE)
    return FinishedRun(config, adapter, metrics, results[-1] if results else None, environment)


def model_card(name: str, run: FinishedRun, base: str, merged: bool, stops: tuple[int, ...]) -> str:
    """The README of the repository. Local files and folders appear without their paths.

    Args:
        name: repository or folder.
        stops: tokens that ended a completion.
    """
    config, data = run.config, run.config.data
    on_hub = not is_local(data.source)
    parts = [data.source, data.subset, data.split] if on_hub else [Path(data.source).name]
    metadata = ModelCardData(
        base_model=None if Path(base).exists() else base,
        datasets=[data.source] if on_hub else None,
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        tags=["stapo_lite", config.algorithm, "reinforcement-learning", "lora"],
        **find_license(base),
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("model_card.md")),
        name=name,
        base=public_name(base),
        data=" ".join(filter(None, parts)),
        merged=merged,
        run=run,
        config=config,
        fields=to_yaml(_public(config.objective)).strip(),
        table=results_table(run.results) if run.results and "benchmarks" in run.results else "",
        served_rank=served_rank(config.lora.r),
        stops=list(stops),
    )
    return str(card)


def _public(objective: Objective) -> Objective:
    """The objective without the server's address and local paths."""
    shown = {"teacher_server": objective.teacher_server and "a server"}
    if objective.teacher_adapter:
        shown["teacher_adapter"] = public_name(objective.teacher_adapter)
    return objective.model_copy(update=shown)


def public_name(base: str) -> str:
    """A model's name on the Hub, or its folder's name without the path."""
    return Path(base).name if Path(base).exists() else base


def is_local(source: str) -> bool:
    """Whether `data.source` is a file (it need not exist here), a function or rows in Python rather
    than a dataset on the Hub."""
    path = Path(source)
    is_file = path.suffix.lower() in (".jsonl", ".parquet") or path.is_absolute() or path.exists()
    return is_file or ":" in source or source == IN_PYTHON


def find_license(base: str) -> dict[str, Any]:
    """License fields of the base's own card; empty if it has none or the Hub is unreachable."""
    try:
        metadata = ModelCard.load(Path(base, "README.md") if Path(base).exists() else base).data
    except Exception:  # no card, no network: the Hub's client raises errors of many kinds
        return {}
    fields = ("license", "license_name", "license_link")
    return {field: metadata[field] for field in fields if metadata.get(field)}
