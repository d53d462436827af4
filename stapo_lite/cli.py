"""The command line: `stapo train configs/quickstart.yaml`, or `python -m stapo_lite train ...`.

Each command is a function below: its positional parameters are arguments, its keyword-only ones
options, each with a help text; its docstring is the description. Slow imports are inside the
functions, so that --help and usage errors respond at once.
"""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from stapo_lite.errors import explained, one_line_errors

if TYPE_CHECKING:  # slow to import
    from stapo_lite.config import Config

ConfigFile = Annotated[Path, "YAML file, see configs/"]
Overrides = Annotated[Sequence[str], "key.sub=value, to replace values of the config"]
RunFolder = Annotated[Path, "output_dir of the run"]
Processes = Annotated[int | None, "how many processes; by default one per card"]
Resume = Annotated[bool, "continue from the newest checkpoint in output_dir, if any"]


def train(
    config_file: ConfigFile,
    overrides: Overrides,
    *,
    processes: Processes = None,
    dry_run: Annotated[bool, "print config and batch arithmetic, and stop"] = False,
    resume: Resume = False,
    force: Annotated[bool, "resume with a config that makes it another run"] = False,
) -> None:
    """Train a LoRA adapter with STAPO."""
    from stapo_lite.config import batch_arithmetic, check_processes, load_config, to_yaml
    from stapo_lite.model.processes import count_processes, launch

    config = load_config(config_file, overrides)
    count = count_processes(processes)
    check_processes(config, count)
    if dry_run:
        if os.environ.get("RANK", "0") == "0":
            print(f"{to_yaml(config)}\n{batch_arithmetic(config, count)}")
        return
    if not launch(count, sys.argv[1:]):
        _train(config, resume, force)


def _train(config: "Config", resume: bool, force: bool = False) -> None:
    """Train in this process."""
    from stapo_lite.assemble import open_run
    from stapo_lite.training.lifecycle import end_on_sigterm
    from stapo_lite.training.loop import train

    end_on_sigterm()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # log files show each step as it ends
    with open_run(config, resume, force) as run:
        for _ in train(run):
            pass
    _end_processes()


def _end_processes() -> None:
    """Stop the process group's threads, which may abort the process at exit."""
    from accelerate import PartialState

    PartialState().destroy_process_group()


def serve(
    config_file: ConfigFile,
    overrides: Overrides,
    *,
    host: Annotated[str, "address to listen on; by default this machine only"] = "127.0.0.1",
    port: Annotated[int, "by default 8000"] = 8000,
) -> None:
    """Serve a run's rollouts by vLLM."""
    from stapo_lite.config import load_config
    from stapo_lite.extras.planning.choice import fit_server
    from stapo_lite.extras.servers.serve import become_server
    from stapo_lite.model.processes import resolve_dtype
    from stapo_lite.rollout import resolve_engine
    from stapo_lite.rollout.vllm_options import check_vllm

    served = [*overrides, "rollout.engine=server", "train.park_trainer=false"]
    config = load_config(config_file, served)
    resolve_engine("vllm")
    dtype = resolve_dtype(config.dtype, config.rollout.quantization)
    config = config.model_copy(update={"dtype": dtype})
    check_vllm(config.rollout, config.dtype)
    become_server(fit_server(config), host, port)


def plan(
    config_file: ConfigFile,
    overrides: Overrides,
    *,
    gpu_memory: Annotated[float, "memory of each card, in GiB"],
    host_memory: Annotated[float | None, "host memory for each card, in GiB"] = None,
    processes: Annotated[int, "how many processes train; by default 1"] = 1,
    hours: Annotated[float | None, "say which steps and batch end in so many hours"] = None,
) -> None:
    """Predict a run's memory and time; the exit status is not 0 if it does not fit."""
    from stapo_lite.config import load_config
    from stapo_lite.extras.planning.choice import apply_all, choose, describe
    from stapo_lite.extras.planning.levers import levers, within
    from stapo_lite.extras.planning.plan import GIB, Hardware, make_plan, report
    from stapo_lite.model.loading import load_model_config

    config = load_config(config_file, overrides)
    model = load_model_config(config.model).get_text_config()
    cards = Hardware(int(gpu_memory * GIB), host_memory and host_memory * GIB, processes)
    given = config
    config = apply_all(given, choose(given, model, cards), model, cards)
    plan = make_plan(config, model, cards)
    print(f"{describe(config, plan, model, cards)}\n{report(plan)}")
    if plan.problems:
        print("It does not fit.", *plan.problems, sep="\n  ")
        raise SystemExit(1)
    if config.rollout.engine != "server" and (lines := levers(given, model, cards)):
        print("what would shorten a step, each change alone:", *lines, sep="\n  ")
    if hours is not None:
        print(within(hours, given, model, cards))
    print("It fits.")


def evaluate(config_file: ConfigFile, overrides: Overrides, *, processes: Processes = None) -> None:
    """Evaluate on math benchmarks; `evaluate compare FOLDER FOLDER ...` shows evaluations side by
    side."""
    if config_file == Path("compare"):
        from stapo_lite.extras.evaluation.results import compare_evaluations

        print(compare_evaluations([Path(folder) for folder in overrides]))
        return
    from stapo_lite.config import load_eval_config
    from stapo_lite.model.processes import count_processes, launch

    config = load_eval_config(config_file, overrides)
    if launch(count_processes(processes), sys.argv[1:]):
        return
    from stapo_lite.extras.evaluation.evaluate import evaluate
    from stapo_lite.extras.evaluation.results import pass_table, results_table

    try:
        results = evaluate(config)
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted; the same command continues the evaluation") from None
    _end_processes()
    if results is not None:
        print(f"{results_table(results)}\n\n{pass_table(results)}\n\nresults: {config.output_dir}")


def show(
    run_folder: RunFolder,
    *,
    worst: Annotated[int, "how many completions; by default 10"] = 10,
    step: Annotated[int | None, "show completions of this step only"] = None,
) -> None:
    """Sum up a run: a table, reward.png in its folder, and the kept completions with the lowest
    rewards."""
    from stapo_lite.extras.audit.report import show_completions, write_report

    with explained(f"{run_folder}: cannot be written", OSError):
        table = write_report(run_folder)
    completions = show_completions(run_folder, worst, step)
    print(table)
    if completions:
        print(f"\n{completions}")


def audit(
    run_folder: RunFolder,
    *,
    out: Annotated[Path | None, "folder of page and PNGs; by default RUN_FOLDER/audit"] = None,
) -> None:
    """Make a page about a run's tokens."""
    from stapo_lite.extras.audit.page import audit

    print(f"page: {audit(run_folder, out)}")


def export(
    run_folder: RunFolder,
    *,
    out: Annotated[Path, "folder to write"],
    merge: Annotated[bool, "merge the adapter into its base"] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        "data type of the exported weights; by default bfloat16",
    ] = "bfloat16",
    base_model: Annotated[
        str | None, "the base in full precision; by default the run's model"
    ] = None,
    evaluation: Annotated[Path | None, "output_dir of an evaluation, for the model card"] = None,
    push_to_hub: Annotated[
        str | None, "repository to push to, USER/NAME; created if there is none"
    ] = None,
    private: Annotated[bool, "make the repository private"] = False,
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


def grade(
    cases: Annotated[Path, "JSON lines of gold, pred and optionally form, answer_type, tolerance"],
    *,
    out: Annotated[Path, "the same lines with `correct`"],
    timeout: Annotated[float | None, "seconds per answer; by default 5"] = None,
    num_workers: Annotated[
        int | None, "how many processes grade; by default one per core, at most 8"
    ] = None,
) -> None:
    """Grade a file of answers by rules."""
    from stapo_lite.extras.math.grading import NUM_WORKERS, TIMEOUT, grade_file

    print(grade_file(cases, out, timeout or TIMEOUT, num_workers or NUM_WORKERS))


def contamination(
    source: Annotated[str, "a .jsonl or .parquet file, or a dataset on the Hub"],
    *,
    subset: Annotated[str | None, "configuration name of a Hub dataset"] = None,
    split: Annotated[str, "split of a Hub dataset; by default train"] = "train",
    prompt_column: Annotated[str | None, "by default prompt, problem or question"] = None,
    benchmarks: Annotated[Sequence[str], "all (the default), their names, or .jsonl files"] = (
        "all",
    ),
    out: Annotated[Path | None, "write the rows that overlap none (.jsonl)"] = None,
) -> None:
    """Find benchmark problems in a training set."""
    from stapo_lite.config import Data
    from stapo_lite.extras.evaluation.contamination import check_dataset

    data = Data(source=source, subset=subset, split=split)
    print(check_dataset(data, prompt_column, benchmarks, out))


def quickstart(overrides: Overrides, *, resume: Resume = False) -> None:
    """Fetch a small model, train it to write a sentence with a given word, and make a page about
    its tokens."""
    from stapo_lite.config import load_config
    from stapo_lite.extras.audit.page import audit
    from stapo_lite.extras.quickstart.model import fetch_model

    config = load_config("configs/quickstart.yaml", overrides)
    print(f"model: {fetch_model()}")
    _train(config, resume)
    print(f"page about its tokens: {audit(config.output_dir)}")


def env(
    *,
    model: Annotated[
        str | None, "folder or Hub name: load it, and compare vLLM with the trainer"
    ] = None,
) -> None:
    """Print versions and hardware for a bug report, and whether a model works here."""
    from stapo_lite.extras.environment import describe_environment

    for line in describe_environment():
        print(line)
    if model is not None:
        print(f"{model}: {_self_check(model)}")


def _self_check(model: str) -> str:
    """Measure the difference between engine and trainer, as a run does before its first step."""
    from stapo_lite.assemble import open_run
    from stapo_lite.config import load_config

    with TemporaryDirectory() as folder:
        keys = {
            "model": model,
            "output_dir": f"{folder}/run",
            "target_modules": "all-linear",
            "max_prompt_length": 512,
            "apply_chat_template": False,
            "system_prompt": None,
        }
        with open_run(load_config("configs/quickstart.yaml", keys)) as run:
            return run.environment["self_check"]


COMMANDS = (
    train, serve, plan, evaluate, show, audit, export, grade, contamination, quickstart, env,
)  # fmt: skip


def main(command: str | None = None) -> None:
    """Run a command; by default the program's first argument names it."""
    if command is None:
        sys.path.insert(0, "")  # finds the user's modules, as `python -m` does
    else:
        sys.argv.insert(1, command)
    functions = {function.__name__: function for function in COMMANDS}
    parser = ArgumentParser("stapo")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, function in functions.items():
        subparsers.add_parser(name, help=function.__doc__, description=function.__doc__)
    chosen = parser.parse_args(sys.argv[1:2] or ["--help"]).command
    subparser = subparsers.choices[chosen]
    for parameter in signature(functions[chosen]).parameters.values():
        _add_argument(subparser, parameter)
    given = subparser.parse_intermixed_args(sys.argv[2:])
    with one_line_errors():
        functions[chosen](**vars(given))


def _add_argument(parser: ArgumentParser, parameter: Parameter) -> None:
    """Add a command's parameter to its parser, as an argument or an option."""
    kind, about = get_args(parameter.annotation)
    name, parts = parameter.name, get_args(kind)
    options: dict[str, Any] = {"help": about}
    if parameter.kind is Parameter.KEYWORD_ONLY:
        name = "--" + name.replace("_", "-")
        options["default"] = parameter.default
        options["required"] = parameter.default is Parameter.empty
    if kind is bool:
        options["action"] = "store_true"
    elif get_origin(kind) is Sequence:
        options["nargs"] = "+" if parameter.kind is Parameter.KEYWORD_ONLY else "*"
    elif get_origin(kind) is Literal:
        options["choices"] = parts
    else:
        reader = parts[0] if parts else kind  # of `int | None`, or of `int`
        options["type"] = _positive(reader) if reader in (int, float) else reader
    parser.add_argument(name, **options)


def _positive(number: type[int] | type[float]) -> Callable[[str], float]:
    """A parser of finite numbers greater than 0."""

    def read(text: str) -> float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise ArgumentTypeError(f"must be greater than 0, got {text}")
        return value

    read.__name__ = number.__name__  # argparse names it if the text is not a number
    return read
