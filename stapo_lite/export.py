"""stapo export runs/x --out DIR [--merge] [--dtype bfloat16] [--push-to-hub user/name --private]"""

import argparse
from pathlib import Path

from stapo_lite.errors import one_line_errors


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="stapo export", description="Export a run's adapter.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its base")
    choices = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=choices, default="bfloat16", help="of what is written")
    parser.add_argument("--base-model", help="the base in full precision; by default the run's model")
    parser.add_argument("--evaluation", type=Path, help="output_dir of an evaluation, for the model card")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="repository to push to; made if there is none")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--gguf", action="store_true", help="print llama.cpp's command for a GGUF file")
    given = vars(parser.parse_args(arguments))
    gguf = given.pop("gguf")
    with one_line_errors():
        from stapo_lite.tools.export import export, gguf_command

        folder = export(**given)
        print(f"exported: {folder}")
        if gguf:
            print(gguf_command(folder, given["dtype"]))


if __name__ == "__main__":
    main()
