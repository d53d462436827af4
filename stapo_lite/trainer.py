"""A training run in Python, with reward functions and data that exist only there."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from stapo_lite.assemble import PythonInputs, open_run
from stapo_lite.config import IN_PYTHON, Config, Prompting, load_config, load_eval_config
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.evaluate import evaluate
from stapo_lite.extras.publish.export import export
from stapo_lite.extras.turns.environments import Environments, Factory
from stapo_lite.extras.turns.episodes import RolloutFunction, chat_with, check_function
from stapo_lite.extras.turns.tools import Tool, schemas_of
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.folder import check_place
from stapo_lite.training.loop import train

RewardFunc = Callable[..., Any] | str


class Trainer:
    """A run that Python drives.

        trainer = Trainer(
            "Qwen/Qwen3-1.7B", reward_funcs=brief, train_dataset=rows, output_dir="runs/brief",
            algorithm="stapo", max_steps=50, learning_rate=1e-5,
        )
        trainer.train()                      # or: for metrics in trainer: ...
        trainer.push_to_hub("me/brief")

    Args:
        model: folder, or name on the Hub; by default that of the config.
        reward_funcs: one or several, callables or names as in `reward.functions`; by default those
            of the config. A callable gets what TRL would give it, runs in this process, and may be
            a lambda, a closure or a coroutine function.
        config: a YAML file, what it would hold as nested dictionaries, or a Config.
        train_dataset: a `datasets.Dataset`, dictionaries, or what `data.source` takes; by default
            that of the config.
        tools: functions that the model may call (docs/turns.md).
        environment_factory: makes an environment for each completion, or several by name, as in
            TRL (docs/turns.md#environments). If it owns the task, leave out `train_dataset`.
        rollout_func: a coroutine function that makes a completion of several turns (docs/turns.md).
        callbacks: called after the run's own (docs/python.md).
        keys: of the config (docs/config.md). A key needs no section (`learning_rate=1e-5`), except
            those of `evaluation={...}` and `rollout={"quantization": ...}`.

    Attributes:
        config: the whole config, checked.

    Raises:
        InputError: a key or value of the config is wrong.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        config: Config | dict[str, Any] | str | Path | None = None,
        train_dataset: Sequence[dict[str, Any]] | str | Path | None = None,
        *,
        tools: Sequence[Tool] = (),
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        rollout_func: RolloutFunction | None = None,
        callbacks: Sequence[Callback] = (),
        **keys: Any,
    ):
        own = dict[str, Callable]()
        rows = None
        if model is not None:
            keys["model"] = str(model)
        if reward_funcs is not None:
            named = _named(reward_funcs)
            keys["reward.functions"] = [name for name, _ in named]
            own = {name: function for name, function in named if callable(function)}
        if environment_factory is not None:
            if rollout_func is not None:
                raise InputError("environment_factory: a rollout_func plays environments itself")
            rollout_func = Environments(environment_factory, tools)
            tools = ()
            if train_dataset is None and config is None:
                train_dataset = [{"prompt": [{"role": "user", "content": ""}]}]
        if isinstance(train_dataset, str | Path):
            keys["data.source"] = train_dataset
        elif train_dataset is not None:
            keys["data.source"] = IN_PYTHON
            rows = train_dataset
        if tools:
            if rollout_func is not None:
                raise InputError("tools: a rollout_func gives them to episode.chat() itself")
            keys["data.chat_template_kwargs.tools"] = schemas_of(tools)  # each prompt has them
            rollout_func = chat_with(tools)
        if rollout_func is not None:
            check_function(rollout_func, "rollout_func")
            keys["rollout.function"] = _name(rollout_func)
        self._file = config if isinstance(config, str | Path) else None
        self._inputs = PythonInputs(own, rows, rollout_func, callbacks)
        tree = config.model_dump(exclude_unset=True) if isinstance(config, Config) else config
        self.config = load_config(tree or {}, keys)

    def steps(self, resume: bool = False, force: bool = False) -> Iterator[dict[str, Any]]:
        """Train step by step; yields the metrics of each one. If the caller stops iterating, the
        run ends there: adapter and checkpoint are written as at the last step.

        Args:
            resume: continue from the newest checkpoint in `output_dir`; start anew if there
                is none.
            force: continue even if keys that affect what the run computes have changed.

        Raises:
            InputError: something in the config, the data or the model cannot be used.
            RunError: the run cannot go on (docs/faults.md).
        """
        if resume and self._file:
            check_place(self._file, self.config.output_dir)
        with open_run(self.config, resume, force, self._inputs) as run:
            yield from train(run)

    __iter__ = steps

    def train(self, resume: bool = False, force: bool = False) -> list[dict[str, Any]]:
        """Train to the end; returns the metrics of each step (docs/metrics.md). Arguments: see
        `steps`."""
        return list(self.steps(resume, force))

    def evaluate(self, **keys: Any) -> dict[str, Any] | None:
        """Sample and grade benchmarks with the adapter of the finished run, prompted as in
        training; returns the results, on the main process.

        Args:
            keys: an evaluation's (docs/config.md), sections as dictionaries: `limit=50,
                rollout={"num_samples": 4}`.

        Raises:
            InputError: there is no adapter, or a key is wrong.
        """
        config = self.config
        folder = Path(self.config.output_dir)
        prompting = config.data.model_dump(include=set(Prompting.model_fields))
        del prompting["max_prompt_length"]  # benchmarks may have longer ones
        as_trained = {"max_completion_length", "quantization"}
        if config.rollout.engine != "server":
            as_trained |= {"engine", "vllm"}
        if keys.get("rollout", {}).get("engine") == "transformers":
            as_trained -= {"quantization", "vllm"}
        rollout = config.rollout.model_dump(include=as_trained)
        tree = {
            "model": config.model,
            "adapter": str(folder / "adapter"),
            "output_dir": str(folder / "evaluation"),
            "dtype": config.dtype,
            **keys,
            "data": prompting | keys.get("data", {}),
            "rollout": rollout | keys.get("rollout", {}),
        }
        return evaluate(load_eval_config(tree))

    def export(self, out: str | Path, **options: Any) -> Path:
        """Write the adapter, or the merged model (`merge=True`), to a new folder, on the main
        process; options as `export` has them."""
        if PartialState().is_main_process:
            export(self.config.output_dir, out, **options)
        PartialState().wait_for_everyone()
        return Path(out)

    def push_to_hub(self, repository: str, **options: Any) -> None:
        """Export to a repository on the Hub, created if it does not exist, and to `hub/NAME` in the
        run folder, in place of what is there; options as in `export`."""
        folder = Path(self.config.output_dir) / "hub" / repository.rpartition("/")[2]
        if PartialState().is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
        self.export(folder, push_to_hub=repository, **options)


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _named(reward_funcs: RewardFunc | Sequence[RewardFunc]) -> list[tuple[str, RewardFunc]]:
    """The functions, each with its name in config and metrics."""
    single = callable(reward_funcs) or isinstance(reward_funcs, str)
    functions: Any = [reward_funcs] if single else reward_funcs
    return [(f if isinstance(f, str) else _name(f), f) for f in functions]
