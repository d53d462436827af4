"""`python -m stapo_lite.rewards grade ...`, the same as `stapo grade ...`."""

import sys
from importlib import import_module  # the grader itself must not come to need what the other commands import

if __name__ == "__main__":
    sys.argv[1:] = sys.argv[1 + (sys.argv[1:2] == ["grade"]) :]
    import_module("stapo_lite.cli").main("grade")
