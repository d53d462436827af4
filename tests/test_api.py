"""The functions a notebook imports, whatever was imported before them."""

import subprocess
import sys

import pytest

import stapo_lite
from stapo_lite.config import InputError

NAMES = ["audit", "compare", "evaluate", "export", "load_config", "load_eval_config", "train"]


@pytest.mark.parametrize(
    "before",
    [
        "pass",
        "import stapo_lite.train, stapo_lite.audit, stapo_lite.export, stapo_lite.evaluate",
        "from stapo_lite.train import prompts_wanted; from stapo_lite.audit import thin",
        "from stapo_lite import train, audit; import stapo_lite.evaluate",
    ],
)
def test_functions_are_functions_in_any_order(before):
    script = f"""
import sys, types
{before}
for _ in range(2):
    from stapo_lite import audit, compare, evaluate, export, load_config, load_eval_config, train
    for f in (audit, compare, evaluate, export, load_config, load_eval_config, train):
        assert isinstance(f, types.FunctionType), f
import stapo_lite, stapo_lite.train, stapo_lite.tracking
assert stapo_lite.train is train is sys.modules["stapo_lite.train"].train
assert isinstance(stapo_lite.tracking, types.ModuleType)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_alone_imports_nothing_heavy():
    script = "import sys, stapo_lite; assert not {'torch', 'transformers', 'pydantic'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_what_there_is():
    assert sorted(stapo_lite.__all__) == NAMES
    with pytest.raises(AttributeError, match="module 'stapo_lite' has no attribute 'trian'"):
        _ = stapo_lite.trian


def test_a_config_from_a_dictionary():
    tree = {"model": "m", "output_dir": "o", "algorithm": "grpo", "train": {"max_steps": 3}}
    config = stapo_lite.load_config(tree, ["train.max_steps=4", "objective.s2t.tau_p=0.01"])
    assert (config.train.max_steps, config.objective.beta, config.objective.s2t.tau_p) == (4, 0.04, 0.01)
    assert tree == {"model": "m", "output_dir": "o", "algorithm": "grpo", "train": {"max_steps": 3}}
    with pytest.raises(InputError, match=r"^config: unknown key 'trian': did you mean 'train'\?"):
        stapo_lite.load_config(tree | {"trian": {}})
    assert stapo_lite.load_eval_config({"model": "m", "output_dir": "o"}).rollout.num_samples is None
