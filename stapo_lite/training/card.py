"""The model card of a run's adapter: the README of its repository, with the Hub's metadata."""

from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData

from stapo_lite.config import IN_PYTHON, Config, load_config, to_yaml
from stapo_lite.errors import InputError
from stapo_lite.evaluation.results import results_table
from stapo_lite.files import read_lines, read_object
from stapo_lite.rollout.vllm_options import served_rank
from stapo_lite.training.checkpoint import newest_checkpoint, read_state
from stapo_lite.training.tracking import ENVIRONMENT_FILE, EVALUATIONS_FILE, run_metrics


class FinishedRun(NamedTuple):
    """The parts of a run folder that belong to the adapter that is exported."""

    config: Config
    adapter: Path
    metrics: list[dict[str, Any]]
    """Steps up to the adapter's."""
    results: dict[str, Any] | None
    """Those of the benchmarks."""
    environment: dict[str, Any]


def read_run(folder: Path, evaluation: str | Path | None) -> FinishedRun:
    """Read a run folder; of a run that goes on, what belongs to its checkpoint.

    Raises:
        InputError: it holds no run with an adapter; the evaluation has no results.
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
    """The README of the repository. A folder of this machine is named without its path.

    Args:
        name: repository or folder.
        stops: tokens that ended a completion.
    """
    config, data = run.config, run.config.data
    path = Path(data.source)
    on_this_machine = path.suffix.lower() in (".jsonl", ".parquet") or path.is_absolute() or path.exists()
    local_data = on_this_machine or ":" in data.source or data.source == IN_PYTHON
    metadata = ModelCardData(
        base_model=None if Path(base).exists() else base,
        datasets=None if local_data else [data.source],
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        tags=["stapo_lite", config.algorithm, "reinforcement-learning", "lora"],
        **find_license(base),
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(files("stapo_lite") / "templates" / "model_card.md"),
        name=name,
        base=Path(base).name if Path(base).exists() else base,
        data=Path(data.source).name if local_data else " ".join(filter(None, [data.source, data.subset, data.split])),
        merged=merged,
        run=run,
        config=config,
        fields=to_yaml(config.objective).strip(),
        table=results_table(run.results) if run.results and "benchmarks" in run.results else "",
        served_rank=served_rank(config.lora.r),
        stops=list(stops),
    )
    return str(card)


def find_license(base: str) -> dict[str, Any]:
    """The licence in the base's own card; nothing where it has none, or the Hub cannot be reached."""
    try:
        metadata = ModelCard.load(Path(base, "README.md") if Path(base).exists() else base).data
    except Exception:  # no card, no network: the Hub's client raises errors of many kinds
        return {}
    return {key: value for key in ("license", "license_name", "license_link") if (value := metadata.get(key))}
