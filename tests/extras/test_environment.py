"""The report that a bug needs."""

import os
from importlib.metadata import version
from types import SimpleNamespace

from helpers import command

from stapo_lite.extras.environment import describe_environment


def test_versions_and_hardware(capsys):
    assert command("env") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines
    assert lines[-1].startswith("auto: engine ")


def test_memory_is_in_gib(monkeypatch):
    memory = SimpleNamespace(total=5 * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert f"host: {os.cpu_count()} cores, 5 GiB" in list(describe_environment())
