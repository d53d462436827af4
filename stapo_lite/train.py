"""accelerate launch -m stapo_lite.train configs/quickstart.yaml [key.sub=value ...] [--dry-run] [--resume [--force]]"""

import os

from stapo_lite.cli import config_parser
from stapo_lite.config import batch_arithmetic, check_processes, load_config, to_yaml
from stapo_lite.errors import one_line_errors


def main(arguments: list[str] | None = None) -> None:
    parser = config_parser("python -m stapo_lite.train", "Train a LoRA adapter with STAPO.")
    parser.add_argument("--dry-run", action="store_true", help="print config and batch arithmetic, and stop")
    parser.add_argument("--resume", action="store_true", help="continue from output_dir's newest checkpoint, if any")
    parser.add_argument("--force", action="store_true", help="resume with a config that makes it another run")
    given = parser.parse_intermixed_args(arguments)
    with one_line_errors():
        config = load_config(given.config, given.overrides)
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        check_processes(config, processes)
        if given.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(f"{to_yaml(config)}\n{batch_arithmetic(config, processes)}")
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
