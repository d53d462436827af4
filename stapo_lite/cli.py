"""One command line for everything: `stapo train configs/quickstart.yaml`, the same as `python -m stapo_lite train ...`.

Commands import what is slow to import once their arguments are read.
"""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from stapo_lite.errors import explained, one_line_errors

if TYPE_CHECKING:  # slow to import
    from stapo_lite.config import Config


def train(parser: ArgumentParser, arguments: list[str]) -> None:
    """Train a LoRA adapter with STAPO."""
    what = "how many processes train; by default one per card"
    parser.add_argument("--processes", type=positive(int), metavar="N", help=what)
    parser.add_argument("--dry-run", action="store_true", help="print config and batch arithmetic, and stop")
    parser.add_argument("--resume", action="store_true", help="continue from output_dir's newest checkpoint, if any")
    parser.add_argument("--force", action="store_true", help="resume with a config that makes it another run")
    given = _with_config(parser, arguments)
    from stapo_lite.config import batch_arithmetic, check_processes, load_config, to_yaml
    from stapo_lite.model.processes import count_processes, launch

    config = load_config(given.config, given.overrides)
    processes = count_processes(given.processes)
    check_processes(config, processes)
    if given.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print(f"{to_yaml(config)}\n{batch_arithmetic(config, processes)}")
        return
    if not launch(processes, ["train", *arguments]):
        _train(config, given.resume, given.force)


def _train(config: "Config", resume: bool = False, force: bool = False) -> None:
    """Run a training in this process."""
    from accelerate import PartialState

    from stapo_lite.training.lifecycle import end_on_sigterm
    from stapo_lite.training.loop import train

    end_on_sigterm()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log file shows each step when it ends
    for _ in train(config, resume, force):
        pass
    PartialState().destroy_process_group()  # its threads, still running at exit, may abort a process


def serve(parser: ArgumentParser, arguments: list[str]) -> None:
    """Serve a run's rollouts by vLLM."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; this machine only by default")
    parser.add_argument("--port", type=int, default=8000)
    given = _with_config(parser, arguments)
    from stapo_lite.config import load_config
    from stapo_lite.serve import serve

    overrides = [*given.overrides, "rollout.engine=server", "train.park_trainer=false"]
    serve(load_config(given.config, overrides), given.host, given.port)


def plan(parser: ArgumentParser, arguments: list[str]) -> None:
    """Predict a run's memory; the exit status is not 0 where it does not fit."""
    parser.add_argument("--gpu-memory", type=positive(float), required=True, metavar="GIB", help="memory of each card")
    parser.add_argument("--host-memory", type=positive(float), metavar="GIB", help="host memory for each card")
    parser.add_argument("--processes", type=positive(int), default=1, metavar="N", help="how many processes train")
    given = _with_config(parser, arguments)
    from stapo_lite.config import load_config

    config = load_config(given.config, given.overrides)
    from stapo_lite.model.loading import load_model_config
    from stapo_lite.planning.choice import apply_all, choose, describe
    from stapo_lite.planning.plan import GIB, Cards, make_plan, report

    model = load_model_config(config.model).get_text_config()
    host_memory = given.host_memory and given.host_memory * GIB  # None stays None
    cards = Cards(int(given.gpu_memory * GIB), host_memory, given.processes)
    config = apply_all(config, choose(config, model, cards), model, cards)
    plan = make_plan(config, model, cards)
    print(f"{describe(config, plan, model, cards)}\n{report(plan)}")
    if plan.problems:
        print("It does not fit.", *plan.problems, sep="\n  ")
        raise SystemExit(1)
    print("It fits.")


def evaluate(parser: ArgumentParser, arguments: list[str]) -> None:
    """Evaluate on math benchmarks; or: compare FOLDER FOLDER ..., evaluations side by side."""
    what = "how many processes sample; by default one per card"
    parser.add_argument("--processes", type=positive(int), metavar="N", help=what)
    given = _with_config(parser, arguments)
    if given.config == Path("compare"):
        from stapo_lite.evaluation.results import compare

        print(compare([Path(folder) for folder in given.overrides]))
        return
    from stapo_lite.config import load_eval_config
    from stapo_lite.model.processes import count_processes, launch

    config = load_eval_config(given.config, given.overrides)
    if launch(count_processes(given.processes), ["evaluate", *arguments]):
        return
    from accelerate import PartialState

    from stapo_lite.evaluation.evaluate import evaluate
    from stapo_lite.evaluation.results import pass_table, results_table

    try:
        results = evaluate(config)
    except KeyboardInterrupt:
        raise SystemExit(f"\ninterrupted; the same command goes on with what is in {config.output_dir}") from None
    PartialState().destroy_process_group()  # its threads, still running at exit, may abort a process
    if results is not None:
        print(f"{results_table(results)}\n\n{pass_table(results)}\n\nresults: {config.output_dir}")


def show(parser: ArgumentParser, arguments: list[str]) -> None:
    """Sum up a run: a table, reward.png in its folder, and the kept completions with the lowest rewards."""
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--worst", type=positive(int), default=10, metavar="N", help="how many; 10 by default")
    parser.add_argument("--step", type=int, metavar="K", help="show completions of this step only")
    given = parser.parse_args(arguments)
    from stapo_lite.training.report import write_report
    from stapo_lite.training.tracking import show_completions

    with explained(f"{given.run_folder}: cannot be written", OSError):
        table = write_report(given.run_folder)
    completions = show_completions(given.run_folder, given.worst, given.step)
    print(table)
    if completions:
        print(f"\n{completions}")


def audit(parser: ArgumentParser, arguments: list[str]) -> None:
    """Make a page about a run's tokens."""
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, help="folder of page and PNGs; by default RUN/audit")
    given = parser.parse_args(arguments)
    from stapo_lite.tools.audit import audit

    print(f"page: {audit(given.run_folder, given.out)}")


def export(parser: ArgumentParser, arguments: list[str]) -> None:
    """Export a run's adapter to publish, merged or as it is."""
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its base")
    choices = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=choices, default="bfloat16", help="data type of the exported weights")
    parser.add_argument("--base-model", help="the base in full precision; by default the run's model")
    parser.add_argument("--evaluation", type=Path, help="output_dir of an evaluation, for the model card")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="repository to push to; made if there is none")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    given = vars(parser.parse_args(arguments))
    from stapo_lite.tools.export import export

    print(f"exported: {export(**given)}")


def grade(parser: ArgumentParser, arguments: list[str]) -> None:
    """Grade a file of answers by rules."""
    from stapo_lite.rewards.grading import NUM_WORKERS, TIMEOUT, grade_file

    parser.add_argument("cases", type=Path, help="JSON lines of gold, pred and optionally form, answer_type, tolerance")
    parser.add_argument("--out", type=Path, required=True, help="the same lines with `correct`")
    parser.add_argument("--timeout", type=positive(float), default=TIMEOUT, help="seconds per answer")
    parser.add_argument("--num-workers", type=positive(int), default=NUM_WORKERS, help="how many processes grade")
    print(grade_file(**vars(parser.parse_args(arguments))))


def contamination(parser: ArgumentParser, arguments: list[str]) -> None:
    """Find benchmark problems in a training set."""
    parser.add_argument("source", help="a .jsonl or .parquet file, or a dataset on the Hub")
    parser.add_argument("--subset", help="configuration name of a Hub dataset")
    parser.add_argument("--split", default="train", help="split of a Hub dataset")
    parser.add_argument("--prompt-column", help="by default `prompt`, `problem` or `question`")
    parser.add_argument("--benchmarks", nargs="+", default=["all"], help="`all`, their names, or .jsonl files")
    parser.add_argument("--out", type=Path, help="write the rows that overlap none (.jsonl)")
    given = parser.parse_args(arguments)
    from stapo_lite.config import Data
    from stapo_lite.data.contamination import check_dataset

    data = Data(source=given.source, subset=given.subset, split=given.split)
    print(check_dataset(data, given.prompt_column, given.benchmarks, given.out))


def quickstart(parser: ArgumentParser, arguments: list[str]) -> None:
    """Fetch a small model, train it to write a sentence with a given word, and make a page about its tokens."""
    parser.add_argument("--resume", action="store_true", help="continue one that was interrupted")
    _overrides(parser)
    given = parser.parse_intermixed_args(arguments)
    from stapo_lite.config import load_config
    from stapo_lite.tools.audit import audit
    from stapo_lite.tools.quickstart import fetch_model

    config = load_config("configs/quickstart.yaml", given.overrides)
    print(f"model: {fetch_model()}")
    _train(config, given.resume)
    print(f"page about its tokens: {audit(config.output_dir)}")


def positive(number: type[int] | type[float]) -> Callable[[str], float]:
    """The reader of an argument that is such a number, finite and greater than 0."""

    def read(text: str) -> float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise ArgumentTypeError(f"must be greater than 0, got {text}")
        return value

    read.__name__ = number.__name__  # for argparse's message where it is no number
    return read


def _with_config(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse arguments that begin with a YAML file and overrides of its keys."""
    parser.add_argument("config", type=Path, help="YAML file, see configs/")
    _overrides(parser)
    return parser.parse_intermixed_args(arguments)


def _overrides(parser: ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replace values of the config")


_FUNCTIONS = (train, serve, plan, evaluate, show, audit, export, grade, contamination, quickstart)
COMMANDS = {function.__name__: function for function in _FUNCTIONS}


def main(command: str | None = None) -> None:
    """Run a command, by default the one that is the program's first argument."""
    arguments = sys.argv[1:]
    if command is None:
        sys.path.insert(0, "")  # where `python -m` finds the user's modules, too
        lines = "\n".join(f"  {name:<14} {function.__doc__}" for name, function in COMMANDS.items())
        parser = ArgumentParser("stapo", "stapo COMMAND ...", epilog=lines, formatter_class=RawDescriptionHelpFormatter)
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below; --help says more")
        command = str(parser.parse_args(arguments[:1] or ["--help"]).command)
        arguments = arguments[1:]
    function = COMMANDS[command]
    with one_line_errors():
        function(ArgumentParser(f"stapo {command}", description=function.__doc__), arguments)
