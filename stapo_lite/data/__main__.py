"""stapo contamination train.jsonl --benchmarks all"""

import argparse
from pathlib import Path

from stapo_lite.config import Data
from stapo_lite.data.contamination import contamination_report, find_overlaps, load_problems
from stapo_lite.data.prompts import load_rows, prompt_text
from stapo_lite.errors import InputError, one_line_errors
from stapo_lite.files import write_lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="stapo contamination", description="Look for benchmark problems in a data set."
    )
    parser.add_argument("contamination", nargs="?", choices=["contamination"], help="may be left out")
    parser.add_argument("source", help="a .jsonl or .parquet file, or a dataset on the Hub")
    parser.add_argument("--subset", help="configuration name of a Hub dataset")
    parser.add_argument("--split", default="train", help="split of a Hub dataset")
    parser.add_argument("--prompt-column", help="by default `prompt`, `problem` or `question`")
    parser.add_argument("--benchmarks", nargs="+", default=["all"], help="`all`, their names, or .jsonl files")
    parser.add_argument("--out", type=Path, help="write the rows that overlap none (.jsonl)")
    given = parser.parse_args(arguments)
    with one_line_errors():
        problems = load_problems(given.benchmarks)
        rows = load_rows(Data(source=given.source, subset=given.subset, split=given.split))
        columns = [given.prompt_column] if given.prompt_column else ["prompt", "problem", "question"]
        column = next((name for name in columns if name in rows[0]), None)
        if column is None:
            raise InputError(f"--prompt-column: {given.source} has the columns {', '.join(rows[0])}; name one")
        texts = [prompt_text(row.get(column)) for row in rows]
        overlaps = find_overlaps(texts, problems)
        print(contamination_report(overlaps, texts, problems))
        if given.out:
            dropped = {overlap.row for overlap in overlaps}
            try:
                write_lines(given.out, (row for number, row in enumerate(rows) if number not in dropped))
            except OSError as error:
                raise InputError(f"--out={given.out}: cannot be written ({error.strerror})") from None
            print(f"{len(rows) - len(dropped)} rows: {given.out}")


if __name__ == "__main__":
    main()
