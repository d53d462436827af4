"""One command line for everything: `stapo train configs/quickstart.yaml`, the same as `python -m stapo_lite.train ...`.

The modules of the commands import what is slow to import once their arguments are read.
"""

import argparse
import importlib
import sys
from pathlib import Path

COMMANDS = {
    "train": ("train", "train a LoRA adapter"),
    "serve": ("serve", "serve a run's rollouts by vLLM"),
    "plan": ("plan", "predict a run's memory"),
    "evaluate": ("evaluate", "take the benchmarks, or compare evaluations"),
    "report": ("report", "a finished run at a glance"),
    "completions": ("completions", "a run's completions, the worst first"),
    "audit": ("audit", "a page about a run's tokens, or about several runs"),
    "export": ("export", "an adapter to publish, merged or as it is"),
    "grade": ("rewards.__main__", "grade a file of answers"),
    "contamination": ("data.__main__", "benchmark problems that a training set holds"),
    "quickstart": ("quickstart", "write the quickstart's model to the cache"),
}
"""Module and help of each command."""


def config_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of a YAML file and overrides of its keys."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("config", type=Path, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replace values of the config")
    return parser


def main() -> None:
    """Run a command."""
    lines = "\n".join(f"  {name:<14} {help}" for name, (_, help) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="stapo", usage="stapo COMMAND ...", epilog=lines, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below; --help says more")
    command = parser.parse_args(sys.argv[1:2]).command
    importlib.import_module(f"stapo_lite.{COMMANDS[command][0]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
