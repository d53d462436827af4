"""The package stays readable: functions of a screen, few arguments."""

import ast

import pytest
from helpers import ROOT

PACKAGE = ROOT / "stapo_lite"
LONGEST, LONGEST_OF_THE_METHOD, MOST_ARGUMENTS = 80, 60, 9
METHOD = [PACKAGE / "training" / name for name in ("loop.py", "update.py")]  # read first


@pytest.mark.parametrize("path", sorted({*PACKAGE.rglob("*.py"), *METHOD}), ids=str)
def test_a_function_is_one_screen(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (LONGEST_OF_THE_METHOD if path in METHOD else LONGEST), node.name
            given = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            assert len(given - {"self", "cls"}) <= MOST_ARGUMENTS, node.name
