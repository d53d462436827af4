"""A stand-in for torchvision, of which PyPI has no build for a CPU's torch. vLLM imports it for the
images that Qwen3.5 could read; no test has one."""

import sys
from types import ModuleType
from unittest.mock import MagicMock

__version__ = "0.28.0"


class Anything(ModuleType):
    """A module that has every name."""

    __path__ = ()  # a package

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


for part in (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    sys.modules[f"torchvision.{part}"] = Anything(f"torchvision.{part}")
