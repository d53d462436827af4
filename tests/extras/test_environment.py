"""The report that a bug needs."""

import sys
from importlib.metadata import version

import pytest
from helpers import command


@pytest.mark.parametrize("last", ["auto: engine ", "torch cannot be imported: "])
def test_versions_and_hardware(capsys, monkeypatch, last):
    if last.startswith("torch"):
        monkeypatch.setitem(sys.modules, "torch", None)
    assert command("env") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines
    assert lines[-1].startswith(last)


@pytest.mark.slow
def test_engine_and_trainer_are_compared(smollm2, capsys):
    assert command("env", "--model", smollm2) == 0
    check = capsys.readouterr().out.splitlines()[-1]
    assert float(check.removeprefix(f"{smollm2}: ").split()[0]) < 0.2
