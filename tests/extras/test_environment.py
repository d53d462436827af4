"""The report that a bug needs."""

from importlib.metadata import version

from helpers import command

from stapo_lite.extras.environment import source_digest


def test_versions_and_hardware(capsys):
    assert command("env") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines
    assert lines[-1].startswith("auto: engine ")


def test_a_digest_changes_with_the_source_of_a_reward(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path, digests = tmp_path / "my_rewards.py", []
    for text in ("def one(): return 1", "def one(): return 2"):
        path.write_text(text)
        digests.append(source_digest(["math", "my_rewards:one"], {}))
    own = {"one": lambda completions: [1.0]}
    digests += [source_digest(["one"], own), source_digest(["math"], own)]
    assert len(set(digests)) == 4
    assert digests[1] == source_digest(["math", "my_rewards:one"], own)
