"""What a run can do without. Each module or folder here may be deleted with its command and its
line in `assemble.py`; the core imports none of them, and they do not import each other, but for
what `pyproject.toml` lists."""
