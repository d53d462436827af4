"""The functions that a notebook imports, and what is imported with them."""

import subprocess
import sys

import pytest
from helpers import ROOT

import stapo_lite

COMMAND = """import sys; sys.argv = ['stapo', *{}]
from stapo_lite.cli import main
try: main()
except SystemExit: pass"""
SCRIPTS = [
    "import sys, stapo_lite; assert 'pydantic' not in sys.modules",
    "import stapo_lite.extras.math.answers, stapo_lite.rewards.functions",
    COMMAND.format(["evaluate", "configs/eval.yaml", "rollout.temperature=0"]),
    COMMAND.format(["train", "configs/quickstart.yaml", "train.batch=3"]),
    COMMAND.format(["train", "--help"]),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_slow_is_imported_when_it_is_needed(script):
    script += "\nimport sys; assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_public_names_by_hand():
    functions = ["audit", "evaluate", "export", "load_config", "load_eval_config"]
    classes = ["Callback", "Config", "EvalConfig", "InputError", "Phase", "RunError", "Trainer"]
    assert sorted(stapo_lite.__all__) == classes + functions
    assert all(callable(getattr(stapo_lite, name)) for name in stapo_lite.__all__)
    with pytest.raises(AttributeError, match="module 'stapo_lite' has no attribute 'trian'"):
        _ = stapo_lite.trian
