"""`python -m stapo_lite COMMAND ...`, the same as `stapo COMMAND ...`."""

from stapo_lite.cli import main

if __name__ == "__main__":
    main()
