"""The config: one typed tree, read from YAML and `key.sub=value` overrides."""

from stapo_lite.config.launch import batch_arithmetic
from stapo_lite.config.loading import flatten, load_config, load_eval_config, to_yaml
from stapo_lite.config.schema import (
    BENCHMARK_NAMES,
    IN_PYTHON,
    S2T,
    Config,
    Data,
    Engine,
    EvalConfig,
    Log,
    Lora,
    Objective,
    Prompting,
    Reward,
    Rollout,
    Stare,
    Train,
)
