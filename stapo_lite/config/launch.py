"""Checks of a config against the processes that were launched."""

from stapo_lite.config.schema import Config
from stapo_lite.errors import InputError


def check_processes(config: Config, num_processes: int) -> None:
    """Raise an InputError if some processes would have no prompt."""
    if config.train.batch_size < num_processes:
        raise InputError(
            f"train.batch_size={config.train.batch_size} is less than the {num_processes} "
            "processes launched: raise it"
        )


def batch_arithmetic(config: Config, num_processes: int) -> str:
    """One line about the sizes of a step: prompts, rollouts, updates, micro-batches."""
    train, generations = config.train, config.rollout.num_generations
    rounds = config.rollout.max_sampling_rounds
    unit = f"round, at most {rounds} rounds a step" if config.rollout.dynamic_sampling else "step"
    return (
        f"{train.batch_size} prompts x {generations} completions = "
        f"{train.batch_size * generations} "
        f"rollouts a {unit}, {train.batch_size // train.mini_batch_size} update(s) of "
        f"{train.mini_batch_size * generations} completions, on {num_processes} process(es) with "
        f"micro-batches of at most {config.largest_microbatch} tokens; {train.max_steps} steps"
    )
