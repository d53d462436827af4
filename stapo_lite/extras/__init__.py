"""What a run can do without. Each module or folder here can be deleted along with its command and
its line in `assemble.py`: the core imports none of them, and they import each other only as
`pyproject.toml` lists."""
