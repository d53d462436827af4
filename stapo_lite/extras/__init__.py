"""What a run can do without.

To delete a module or folder here, delete also its command and its line in `assemble.py`. The core
imports none of them. They import each other only as `pyproject.toml` lists.
"""
