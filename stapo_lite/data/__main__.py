"""`python -m stapo_lite.data contamination ...`, the same as `stapo contamination ...`."""

import sys
from importlib import import_module  # this room may not import what the other commands do

if __name__ == "__main__":
    sys.argv[1:] = sys.argv[1 + (sys.argv[1:2] == ["contamination"]) :]
    import_module("stapo_lite.cli").main("contamination")
