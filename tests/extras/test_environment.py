"""The report that a bug needs."""

import sys
from importlib.metadata import version

import pytest
from helpers import command


def test_versions_and_hardware(capsys):
    assert command("env") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines
    assert any(line.startswith("host: ") for line in lines)
    assert lines[-1].startswith("auto: engine ")


def test_versions_are_printed_if_torch_cannot_be_imported(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command("env") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines
    assert lines[-1].startswith("torch cannot be imported: ")


@pytest.mark.slow
def test_engine_and_trainer_are_compared(smollm2, capsys):
    assert command("env", "--model", smollm2) == 0
    check = capsys.readouterr().out.splitlines()[-1]
    assert check.startswith(f"{smollm2}: ")
    assert float(check.split()[1]) < 0.2
