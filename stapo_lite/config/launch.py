"""What a config means for the processes that were launched."""

from stapo_lite.config.schema import Config


def batch_arithmetic(config: Config, num_processes: int) -> str:
    """Describe the sizes of a step in one line: prompts, rollouts, updates, processes."""
    train = config.train
    generations = config.rollout.num_generations
    unit = "round" if config.rollout.dynamic_sampling else "step"
    return (
        f"{train.batch_size} prompts x {generations} completions = "
        f"{train.batch_size * generations} rollouts a {unit}, "
        f"{train.batch_size // train.mini_batch_size} update(s) of "
        f"{train.mini_batch_size * generations} completions, on {num_processes} process(es); "
        f"{train.max_steps} steps"
    )
