"""The functions that a notebook imports."""

import subprocess
import sys

import pytest
from helpers import ROOT

import stapo_lite

NAMES = ["audit", "evaluate", "export", "load_config", "load_eval_config"]
CLASSES = ["Callback", "Config", "EvalConfig", "InputError", "RunError", "Trainer"]


def test_public_names_are_imported_when_they_are_asked_for():
    script = f"""
import sys, types, stapo_lite
assert "pydantic" not in sys.modules
from stapo_lite import {", ".join(NAMES + CLASSES)}
assert all(isinstance(f, types.FunctionType) for f in ({", ".join(NAMES)}))
assert all(isinstance(c, type) for c in ({", ".join(CLASSES)}))
assert stapo_lite.audit is audit is sys.modules["stapo_lite.extras.audit.page"].audit
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_sandboxes_graders_and_the_command_line_import_nothing_heavy():
    script = "import sys, stapo_lite; assert 'pydantic' not in sys.modules; "
    script += (
        "import stapo_lite.cli, stapo_lite.extras.math.answers, stapo_lite.rewards.functions; "
    )
    script += "assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "configs/eval.yaml", "rollout.temperature=0"],
        ["train", "configs/quickstart.yaml", "train.batch=3"],
        ["grade", "--help"],
    ],
)
def test_mistakes_and_help_are_answered_before_anything_slow_is_imported(words):
    script = f"import sys; sys.argv = ['stapo', *{words}]\n"
    script += "from stapo_lite.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    script += "assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_public_names_by_hand():
    assert sorted(stapo_lite.__all__) == CLASSES + NAMES
    with pytest.raises(AttributeError, match="module 'stapo_lite' has no attribute 'trian'"):
        _ = stapo_lite.trian
