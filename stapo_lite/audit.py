"""stapo audit runs/x [--out DIR]; stapo audit compare runs/a runs/b ... [--out DIR]"""

import argparse
from pathlib import Path

from stapo_lite.errors import InputError, one_line_errors


def main(arguments: list[str] | None = None) -> None:
    description = "A page about a run's tokens, or about several runs."
    parser = argparse.ArgumentParser(prog="stapo audit", description=description)
    parser.add_argument("folders", nargs="+", metavar="RUN", help="a run folder; or `compare` and several")
    parser.add_argument("--out", type=Path, help="folder of page and PNGs; by default RUN/audit, or runs/compare")
    given = parser.parse_args(arguments)
    with one_line_errors():
        from stapo_lite.tools.audit import audit, compare

        if given.folders[0] == "compare":
            page = compare(given.folders[1:], given.out or Path("runs/compare"))
        elif len(given.folders) == 1:
            page = audit(given.folders[0], given.out)
        else:
            raise InputError(f"one run folder, or: compare {' '.join(given.folders)}")
        print(f"page: {page}")


if __name__ == "__main__":
    main()
