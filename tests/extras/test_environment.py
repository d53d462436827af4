"""The report that a bug needs."""

from importlib.metadata import version

from helpers import command


def test_versions_and_hardware(capsys):
    assert command("env") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines
    assert lines[-1].startswith("auto: engine ")
