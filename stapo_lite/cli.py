"""The command line: `stapo train configs/quickstart.yaml`, or `python -m stapo_lite train ...`.

Slow imports are inside the functions, so that --help and usage errors respond at once.
"""

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, Typer

from stapo_lite.errors import one_line_errors

if TYPE_CHECKING:  # slow to import
    from stapo_lite.config import Config

app = Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
ConfigFile = Annotated[Path, Argument(help="YAML file, see configs/")]
Overrides = Annotated[
    list[str],
    Argument(
        default_factory=list,
        show_default=False,
        help="key.sub=value, to replace values of the config",
    ),
]
RunFolder = Annotated[Path, Argument(help="output_dir of the run")]
Resume = Annotated[
    bool, Option("--resume", help="continue from the newest checkpoint in output_dir, if any")
]


@app.command("train")
def train_command(
    config_file: ConfigFile,
    overrides: Overrides,
    dry_run: Annotated[
        bool, Option("--dry-run", help="print config and batch arithmetic, and stop")
    ] = False,
    resume: Resume = False,
    force: Annotated[
        bool, Option("--force", help="resume with a config that makes it another run")
    ] = False,
) -> None:
    """Train a LoRA adapter, in this process; on several cards:
    `accelerate launch -m stapo_lite.train CONFIG_FILE`."""
    from stapo_lite.config import batch_arithmetic, load_config, to_yaml
    from stapo_lite.training.folder import check_place

    config = load_config(config_file, overrides)
    if dry_run:
        print(f"{to_yaml(config)}\n{batch_arithmetic(config, 1)}")
    else:
        if resume:
            check_place(config_file, config.output_dir)
        _train(config, resume, force)


def _train(config: "Config", resume: bool, force: bool = False) -> None:
    """Train in this process."""
    import torch

    from stapo_lite.assemble import open_run
    from stapo_lite.training.lifecycle import end_on_sigterm
    from stapo_lite.training.loop import train

    end_on_sigterm()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # log files show each step as it ends
    with open_run(config, resume, force) as run:
        cards = torch.cuda.device_count()
        if cards > 1 and run.accelerator.num_processes == 1:
            print(f"on one of {cards} cards; accelerate launch -m stapo_lite.train uses all")
        for _ in train(run):
            pass
    _end_processes()


def _end_processes() -> None:
    """Stop the process group's threads, which may abort the process at exit."""
    from accelerate import PartialState

    PartialState().destroy_process_group()


@app.command("serve")
def serve_command(
    config_file: ConfigFile,
    overrides: Overrides,
    host: Annotated[
        str, Option(help="address to listen on; by default this machine only")
    ] = "127.0.0.1",
    port: int = 8000,
) -> None:
    """Serve a run's rollouts by vLLM."""
    from stapo_lite.config import load_config
    from stapo_lite.extras.servers.serve import become_server
    from stapo_lite.model.adapter import find_start, name_layers, read_fitting_adapter
    from stapo_lite.model.processes import resolve_dtype
    from stapo_lite.rollout.make import resolve_engine
    from stapo_lite.rollout.vllm_options import check_vllm

    config = load_config(config_file, [*overrides, "rollout.engine=server"])
    resolve_engine("vllm")
    dtype = resolve_dtype(config.dtype, config.rollout.quantization)
    lora = name_layers(config.lora, config.model)
    config = config.model_copy(update={"dtype": dtype, "lora": lora})
    check_vllm(config.rollout, config.dtype)
    if start := find_start(config.lora):
        read_fitting_adapter(start, config.model)
    become_server(config, host, port)


@app.command("plan")
def plan_command(
    config_file: ConfigFile,
    overrides: Overrides,
    gpu_memory: Annotated[float, Option(min=0, help="memory of the card, in GiB")],
) -> None:
    """Add up a run's memory, to choose a card."""
    from stapo_lite.config import load_config
    from stapo_lite.extras.planning import plan

    print(plan(load_config(config_file, overrides), gpu_memory))


@app.command("evaluate")
def evaluate_command(config_file: ConfigFile, overrides: Overrides) -> None:
    """Evaluate on math benchmarks."""
    from stapo_lite.config import load_eval_config

    config = load_eval_config(config_file, overrides)
    from stapo_lite.extras.evaluation.evaluate import evaluate
    from stapo_lite.extras.evaluation.results import results_page

    try:
        results = evaluate(config)
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted; the same command continues the evaluation") from None
    _end_processes()
    if results is not None:
        print(f"{results_page(results)}\nresults: {config.output_dir}")


@app.command("show")
def show_command(
    run_folder: RunFolder,
    worst: Annotated[int, Option(help="how many completions; by default 10")] = 10,
    step: Annotated[int | None, Option(help="show completions of this step only")] = None,
) -> None:
    """Sum up a run: a table, reward.png in its folder, and the kept completions with the lowest
    rewards."""
    from stapo_lite.extras.audit.report import show_completions, write_report

    print(write_report(run_folder))
    completions = show_completions(run_folder, worst, step)
    if completions:
        print(f"\n{completions}")


@app.command("audit")
def audit_command(
    run_folder: RunFolder,
    out: Annotated[
        Path | None, Option(help="folder of page and PNGs; by default RUN_FOLDER/audit")
    ] = None,
) -> None:
    """Make a page about a run's tokens."""
    from stapo_lite.extras.audit.page import audit

    print(f"page: {audit(run_folder, out)}")


@app.command("export")
def export_command(
    run_folder: RunFolder,
    out: Annotated[Path, Option(help="folder to write")],
    merge: Annotated[bool, Option("--merge", help="merge the adapter into its base")] = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    base_model: Annotated[
        str | None, Option(help="the base in full precision; by default the run's model")
    ] = None,
    evaluation: Annotated[
        Path | None, Option(help="output_dir of an evaluation, for the model card")
    ] = None,
    push_to_hub: Annotated[
        str | None, Option(help="repository to push to, USER/NAME; created if there is none")
    ] = None,
    private: Annotated[bool, Option("--private", help="make the repository private")] = False,
) -> None:
    """Export a run's adapter to publish, merged or as it is."""
    from stapo_lite.extras.publish.export import export

    folder = export(
        run_folder,
        out,
        merge=merge,
        dtype=dtype,
        base_model=base_model,
        evaluation=evaluation,
        push_to_hub=push_to_hub,
        private=private,
    )
    print(f"exported: {folder}")


@app.command("quickstart")
def quickstart_command(overrides: Overrides, resume: Resume = False) -> None:
    """Fetch a small model, train it to write a sentence with a given word, and make a page about
    its tokens."""
    from stapo_lite.config import load_config
    from stapo_lite.extras.audit.page import audit
    from stapo_lite.extras.quickstart.model import fetch_model

    config = load_config("configs/quickstart.yaml", overrides)
    print(f"model: {fetch_model()}")
    _train(config, resume)
    print(f"page about its tokens: {audit(config.output_dir)}")


@app.command("env")
def env_command() -> None:
    """Print versions and hardware for a bug report."""
    from stapo_lite.extras.environment import describe_environment

    for line in describe_environment():
        print(line)


def main(command: str | None = None) -> None:
    """Run a command; by default the program's first argument names it."""
    if command is None:
        sys.path.insert(0, "")  # finds the user's modules, as `python -m` does
    else:
        sys.argv.insert(1, command)
    with one_line_errors():
        app()
