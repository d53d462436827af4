"""stapo report runs/x"""

import argparse
from pathlib import Path

from stapo_lite.errors import one_line_errors


def main(arguments: list[str] | None = None) -> None:
    description = "A finished run at a glance: a table, and reward.png in its folder."
    parser = argparse.ArgumentParser(prog="stapo report", description=description)
    parser.add_argument("run_folder", type=Path)
    run_folder = parser.parse_args(arguments).run_folder
    with one_line_errors():
        from stapo_lite.training.report import write_report

        print(write_report(run_folder))


if __name__ == "__main__":
    main()
