"""accelerate launch -m stapo_lite.evaluate configs/eval.yaml model=... adapter=... [key.sub=value ...]

python -m stapo_lite.evaluate compare runs/eval-a runs/eval-b
"""

from pathlib import Path

from stapo_lite.cli import config_parser
from stapo_lite.config import load_eval_config
from stapo_lite.errors import one_line_errors


def main(arguments: list[str] | None = None) -> None:
    description = "Evaluate on math benchmarks; or: compare FOLDER FOLDER ..., evaluations side by side."
    given = config_parser("python -m stapo_lite.evaluate", description).parse_intermixed_args(arguments)
    with one_line_errors():
        if str(given.config) == "compare":
            from stapo_lite.evaluation.results import compare

            print(compare([Path(folder) for folder in given.overrides]))
            return
        config = load_eval_config(given.config, given.overrides)
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
