"""stapo quickstart"""

import argparse

from stapo_lite.errors import one_line_errors


def main(arguments: list[str] | None = None) -> None:
    description = "Write the quickstart's model, SmolLM2-135M-Instruct, to the cache."
    argparse.ArgumentParser(prog="stapo quickstart", description=description).parse_args(arguments)
    with one_line_errors():
        from stapo_lite.tools.quickstart import fetch_model

        print(f"model: {fetch_model()}")


if __name__ == "__main__":
    main()
