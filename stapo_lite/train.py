"""stapo train configs/quickstart.yaml [key.sub=value ...] [--processes N] [--dry-run] [--resume [--force]]

The same as `accelerate launch -m stapo_lite.train ...`, which is needed for several machines or a sharded base only.
"""

import os
import sys

from stapo_lite.cli import config_parser
from stapo_lite.config import batch_arithmetic, check_processes, load_config, to_yaml
from stapo_lite.errors import one_line_errors
from stapo_lite.model.processes import count_processes, launch


def main(arguments: list[str] | None = None) -> None:
    parser = config_parser("stapo train", "Train a LoRA adapter with STAPO.")
    parser.add_argument("--processes", type=int, metavar="N", help="that train; by default one for each card")
    parser.add_argument("--dry-run", action="store_true", help="print config and batch arithmetic, and stop")
    parser.add_argument("--resume", action="store_true", help="continue from output_dir's newest checkpoint, if any")
    parser.add_argument("--force", action="store_true", help="resume with a config that makes it another run")
    given = parser.parse_intermixed_args(arguments)
    with one_line_errors():
        config = load_config(given.config, given.overrides)
        processes = count_processes(given.processes)
        check_processes(config, processes)
        if given.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(f"{to_yaml(config)}\n{batch_arithmetic(config, processes)}")
            return
        if launch("stapo_lite.train", processes, sys.argv[1:] if arguments is None else arguments):
            return
        from accelerate import PartialState

        from stapo_lite.training.lifecycle import end_on_sigterm
        from stapo_lite.training.loop import train

        end_on_sigterm()
        for _ in train(config, given.resume, given.force):
            pass
        PartialState().destroy_process_group()  # its threads, still running at exit, may abort a process


if __name__ == "__main__":
    main()
