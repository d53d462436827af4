"""Environments as TRL's GRPOTrainer takes them: a class whose public methods are the tools.

    class Game:
        def reset(self, **columns):       # before each completion, with the row's columns
            self.number = random.randint(1, 9)
            self.tries = 0
            return "Guess a number from 1 to 9."    # appended to the last user message, or None

        def guess(self, number: int) -> str:
            '''Guess it.

            Args:
                number: the guess
            '''
            self.tries += 1
            return "right" if number == self.number else "wrong"

        def get_reward(self) -> float:    # if there is one, a reward of weight 1, called `Game`
            return 1 / self.tries if self.tries else 0.0

Each completion has an environment of its own, which reward functions get as `environments`. The
next completions, which are sampled after these have their rewards, get the same environments.
"""

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stapo_lite.errors import InputError, explained
from stapo_lite.extras.turns.episodes import Episode
from stapo_lite.extras.turns.tools import Tool, schemas_of

Factory = Callable[[], Any]


class Environments:
    """A rollout function that lets the model play, and the rewards that the environments give.

    Args:
        factory: makes an environment; or several factories by the names in column `environment`.
        tools: further tools of every environment.

    Attributes:
        rewards: reward functions by the names of the classes that have `get_reward`.
        has_tools: whether there is anything to call.

    Raises:
        InputError: an environment has no `reset`, or a method is no tool.
    """

    def __init__(self, factory: Factory | Mapping[str, Factory], tools: Sequence[Tool] = ()):
        self._factories = dict(factory) if isinstance(factory, Mapping) else {"": factory}
        self._chosen = isinstance(factory, Mapping)
        self._tools = tools
        self._made = {name: [make()] for name, make in self._factories.items()}
        self._batch: object = None
        made = [environment for (environment,) in self._made.values()]
        for environment in made:
            if not hasattr(environment, "reset"):
                raise InputError(f"environment_factory: {type(environment).__name__} has no reset")
        schemas = [schemas_of(self._tools_of(environment)) for environment in made]
        self.has_tools = any(schemas)
        kinds = [type(environment) for environment in made if hasattr(environment, "get_reward")]
        self.rewards = {kind.__name__: _reward_of(kind) for kind in kinds}

    async def __call__(self, episode: Episode) -> None:
        """Play one episode."""
        columns = dict(episode.prompt.columns)
        name = ""
        if self._chosen:
            name = columns.pop("environment", None)
            if name not in self._factories:
                choices = ", ".join(self._factories)
                raise InputError(f"environment={name!r} in a row: choose from {choices}")
        environment = await self._take(name, episode)
        columns["prompt"] = episode.prompt.prompt
        observation = await episode.call(environment.reset, **columns)
        messages = episode.messages
        if observation is not None:
            last = messages[-1]
            messages[-1] = last | {"content": last["content"] + observation}
        await episode.chat(messages, self._tools_of(environment), max_turns=sys.maxsize)
        episode.prompt = replace(episode.prompt, live={"environments": environment})

    async def _take(self, name: str, episode: Episode) -> Any:
        """An environment that no other episode of the batch has: one of an earlier batch, as in
        TRL, since an environment may hold a connection, of which a server has so many only."""
        if self._batch is not episode.batch:
            self._batch = episode.batch
            self._free = {name: list(made) for name, made in self._made.items()}
        if self._free[name]:
            return self._free[name].pop()
        environment = await episode.call(self._factories[name])
        self._made[name].append(environment)
        return environment

    def _tools_of(self, environment: Any) -> list[Tool]:
        """The tools, and the environment's public methods but its own two."""
        methods = [
            getattr(environment, name)
            for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
            if not name.startswith("_") and name not in ("reset", "get_reward")
        ]
        return [*self._tools, *methods]


def find_environments(path: str) -> Environments:
    """The environments at `package.module:Class`, or at a dictionary of classes.

    Raises:
        InputError: there are none.
    """
    with explained(f"rollout.environment={path}: cannot be imported"):
        factory = pkgutil.resolve_name(path)
    return Environments(factory)


def _reward_of(kind: Any) -> Callable[..., Any]:
    """The reward function of a class of environments; None for completions of another."""

    def get_reward(environments: Sequence[Any], **columns: Any) -> list[Any]:
        return [e.get_reward() if type(e).__name__ == kind.__name__ else None for e in environments]

    async def awaited(environments: Sequence[Any], **columns: Any) -> list[float | None]:
        rewards = get_reward(environments)
        return [None if reward is None else await reward for reward in rewards]

    return awaited if inspect.iscoroutinefunction(kind.get_reward) else get_reward
