"""The functions a notebook imports, whatever was imported before them."""

import subprocess
import sys

import pytest

import stapo_lite

NAMES = ["audit", "evaluate", "export", "load_config", "load_eval_config"]
CLASSES = ["Config", "EvalConfig", "InputError", "RunError", "Trainer"]


def test_functions_are_functions_in_any_order():
    """A command's module has the name of a function: it must not take its place."""
    script = f"""
import importlib, sys, types
for before in ([], ["train", "audit", "export", "evaluate"]):
    for name in [name for name in sys.modules if name.startswith("stapo_lite")]:
        del sys.modules[name]
    for name in before:
        importlib.import_module("stapo_lite." + name)
    for _ in range(2):
        from stapo_lite import {", ".join(NAMES + CLASSES)}
        for f in ({", ".join(NAMES)}):
            assert isinstance(f, types.FunctionType), f
        assert all(isinstance(c, type) for c in ({", ".join(CLASSES)}))
        import stapo_lite.train, stapo_lite.audit, stapo_lite.training
    assert stapo_lite.audit is audit is sys.modules["stapo_lite.tools.audit"].audit
    assert isinstance(stapo_lite.training, types.ModuleType)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sandboxes_graders_and_the_command_line_import_nothing_heavy():
    script = "import sys, stapo_lite; assert 'pydantic' not in sys.modules; "
    script += "import stapo_lite.cli, stapo_lite.rewards.answers, stapo_lite.rewards.functions; "
    script += "assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_there_is():
    assert sorted(stapo_lite.__all__) == CLASSES + NAMES
    with pytest.raises(AttributeError, match="module 'stapo_lite' has no attribute 'trian'"):
        _ = stapo_lite.trian
