"""The door for `accelerate launch -m stapo_lite.train CONFIG ...`; else `stapo train CONFIG ...`
does the same."""

from stapo_lite.cli import main

if __name__ == "__main__":
    main("train")
