"""stapo evaluate configs/eval.yaml model=... adapter=... [key.sub=value ...] [--processes N]

stapo evaluate compare runs/eval-a runs/eval-b
"""

import sys
from pathlib import Path

from stapo_lite.cli import config_parser
from stapo_lite.config import load_eval_config
from stapo_lite.errors import one_line_errors
from stapo_lite.model.processes import count_processes, launch


def main(arguments: list[str] | None = None) -> None:
    description = "Evaluate on math benchmarks; or: compare FOLDER FOLDER ..., evaluations side by side."
    parser = config_parser("stapo evaluate", description)
    parser.add_argument("--processes", type=int, metavar="N", help="that sample; by default one for each card")
    given = parser.parse_intermixed_args(arguments)
    with one_line_errors():
        if str(given.config) == "compare":
            from stapo_lite.evaluation.results import compare

            print(compare([Path(folder) for folder in given.overrides]))
            return
        config = load_eval_config(given.config, given.overrides)
        processes = count_processes(given.processes)
        if launch("stapo_lite.evaluate", processes, sys.argv[1:] if arguments is None else arguments):
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


if __name__ == "__main__":
    main()
