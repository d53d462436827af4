"""stapo completions runs/x [--worst 20] [--step 30]"""

import argparse
from pathlib import Path

from stapo_lite.errors import one_line_errors


def main(arguments: list[str] | None = None) -> None:
    description = "The completions that a run has kept (log.completions), the lowest rewards first."
    parser = argparse.ArgumentParser(prog="stapo completions", description=description)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="how many; 10 by default")
    parser.add_argument("--step", type=int, help="of this step alone")
    given = parser.parse_args(arguments)
    with one_line_errors():
        from stapo_lite.training.tracking import show_completions

        print(show_completions(given.run_folder, given.worst, given.step))


if __name__ == "__main__":
    main()
