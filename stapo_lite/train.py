"""Entry point for `accelerate launch -m stapo_lite.train CONFIG ...`; same as `stapo train`."""

from stapo_lite.cli import main

if __name__ == "__main__":
    main("train")
