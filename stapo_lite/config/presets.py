"""Presets: algorithms, variants of S2T, decodings.

A preset sets keys that the user has not given. docs/methods.md and docs/deviations.md have the
sources of the values.
"""

from typing import Any

Presets = dict[str, dict[str, dict[str, Any]]]
"""A preset's key -> its value -> the keys that it sets, and their values. If two presets set a key,
the first one wins."""

_NO_S2T = {"objective.s2t.enabled": False, "objective.entropy_coef": 0.0}
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "stapo": {},  # the defaults
    "justrl": _NO_S2T,
    "20-entropy": _NO_S2T | {"objective.top_entropy_quantile": 0.2, "objective.renormalize": False},
    "dapo": _NO_S2T | {"rollout.dynamic_sampling": True, "reward.overlong_penalty": 1.0},
    "grpo": _NO_S2T
    | {
        "objective.aggregation": "sequence-mean",
        "objective.epsilon_high": 0.2,
        "objective.beta": 0.04,
    },
    "dr-grpo": _NO_S2T
    | {
        "objective.aggregation": "constant",
        "objective.epsilon_high": 0.2,
        "objective.scale_rewards": "none",
    },
    "cispo": _NO_S2T
    | {"objective.token_loss": "cispo", "objective.epsilon": 1.0, "objective.epsilon_high": 4.0},
    "gspo": _NO_S2T
    | {
        "objective.token_loss": "gspo",
        "objective.aggregation": "sequence-mean",
        "objective.epsilon": 3e-4,
        "objective.epsilon_high": 4e-4,
    },
    "dppo": _NO_S2T
    | {
        "objective.token_loss": "dppo",
        "objective.aggregation": "constant",
        "objective.epsilon": 0.15,
        "objective.epsilon_high": 0.15,
        "objective.scale_rewards": "none",
        "objective.old_logprobs": "rollout",
    },
    "sapo": _NO_S2T | {"objective.token_loss": "sapo", "objective.aggregation": "sequence-mean"},
    "gdpo": _NO_S2T | {"objective.scale_rewards": "each"},
    "maxrl": _NO_S2T | {"objective.scale_rewards": "mean", "reward.incorrect": 0.0},
    "stare": _NO_S2T | {"objective.stare.weight": 1.1},
    "distill": _NO_S2T | {"reward.functions": []},
}
_S2T_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},  # the defaults
    "paper-v1": {"objective.s2t.quantile": 0.8, "objective.s2t.population": "all"},
    "article": {
        "objective.s2t.tau_p": 0.01,
        "objective.s2t.quantile": 0.05,
        "objective.s2t.population": "all",
        "objective.entropy_coef": 0.001,
    },
    "full": {"objective.s2t.silence": "all"},
    "high-entropy": {"objective.s2t.silence": "high-entropy"},
    "random": {"objective.s2t.silence": "random"},
}
PRESETS: Presets = {"algorithm": _ALGORITHMS, "objective.s2t.preset": _S2T_PRESETS}

EVAL_PRESETS: Presets = {
    "decoding": {
        "training-aligned": {},  # the defaults
        "justrl": {"rollout.temperature": 0.7, "rollout.top_p": 0.9},
    }
}
"""The two decodings of the paper's tables."""
