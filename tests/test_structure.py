"""The package stays readable: functions of a screen, few arguments."""

import ast

import pytest
from conftest import ROOT

LONGEST, MOST_ARGUMENTS = 80, 8
METHOD = {"train.py", "update.py"}  # what one reads first
LONGEST_OF_THE_METHOD = 60


@pytest.mark.parametrize("path", sorted((ROOT / "stapo_lite").rglob("*.py")), ids=lambda path: path.stem)
def test_a_function_is_one_screen(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = node.end_lineno - node.lineno + 1
        assert lines <= (LONGEST_OF_THE_METHOD if path.name in METHOD else LONGEST), node.name
        given = node.args
        names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        names += [argument.arg for argument in (given.vararg, given.kwarg) if argument]
        assert len([name for name in names if name not in ("self", "cls")]) <= MOST_ARGUMENTS, node.name
