"""The package stays readable: functions of a screen, few arguments."""

import ast

import pytest
from helpers import ROOT

PACKAGE = ROOT / "stapo_lite"
LONGEST, LONGEST_OF_THE_METHOD, MOST_ARGUMENTS = 80, 60, 8
METHOD = [
    PACKAGE / "training" / "loop.py",
    PACKAGE / "training" / "update.py",
]  # what one reads first


@pytest.mark.parametrize("path", sorted({*PACKAGE.rglob("*.py"), *METHOD}), ids=str)
def test_a_function_is_one_screen(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (LONGEST_OF_THE_METHOD if path in METHOD else LONGEST), node.name
            given = [
                argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)
            ]
            assert len([name for name in given if name not in ("self", "cls")]) <= MOST_ARGUMENTS, (
                node.name
            )
