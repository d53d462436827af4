"""The package's presets and options, and what the formulas of the oracle say of them."""

from helpers import LONGEST

NO_S2T = {"silence": None}
HIGH_4 = {"epsilon_high": 4.0}
BOTH = {"target_entropy": 9.0, "negative_weight": 0.5, "share": 0.3}
EVERYTHING = {"beta": 0.1, "entropy_coef": 0.05, "aggregation": "sequence-mean"}
CASES = {
    "stapo": ({}, {}),
    "another quantile": ({"s2t": {"quantile": 0.3}}, {"q": 0.3}),
    "paper-v1": ({"s2t": {"preset": "paper-v1"}}, {"population": "all", "q": 0.8}),
    "article": (
        {"s2t": {"preset": "article", "tau_p": 0.05}},
        {"population": "all", "q": 0.05, "tau_p": 0.05, "entropy_coef": 0.001},
    ),
    "full": ({"s2t": {"preset": "full"}}, {"silence": "all"}),
    "high-entropy": ({"s2t": {"preset": "high-entropy"}}, {"silence": "high-entropy"}),
    "random": ({"s2t": {"preset": "random"}}, {"silence": "random"}),
    "justrl": ({"algorithm": "justrl"}, NO_S2T),
    "justrl, v1": (
        {"algorithm": "justrl", "s2t": {"preset": "paper-v1"}},
        NO_S2T | {"population": "all", "q": 0.8},
    ),
    "dapo": ({"algorithm": "dapo"}, NO_S2T),
    "20-entropy": ({"algorithm": "20-entropy"}, NO_S2T | {"top": 0.2, "renormalize": False}),
    "20-entropy renormalized": (
        {"algorithm": "20-entropy", "renormalize": True},
        NO_S2T | {"top": 0.2},
    ),
    "grpo": (
        {"algorithm": "grpo"},
        NO_S2T | {"aggregation": "sequence-mean", "epsilon_high": 0.2, "beta": 0.04},
    ),
    "dr-grpo": (
        {"algorithm": "dr-grpo"},
        NO_S2T | {"aggregation": "constant", "epsilon_high": 0.2, "max_length": LONGEST},
    ),
    "cispo": ({"algorithm": "cispo"}, NO_S2T | {"token_loss": "cispo", "epsilon": 1.0} | HIGH_4),
    "cispo, low": (
        {"algorithm": "cispo", "epsilon": 0.2, "epsilon_high": 0.28},
        NO_S2T | {"token_loss": "cispo"},
    ),
    # Without weights of tokens the objective is the paper's, of whole sequences.
    "gspo": (
        {"algorithm": "gspo", "epsilon_high": 0.1, "sampler_correction": "off"},
        NO_S2T
        | {"token_loss": "gspo", "aggregation": "sequence-mean", "epsilon": 3e-4}
        | {"epsilon_high": 0.1, "correction": "off"},
    ),
    "dppo": (
        {"algorithm": "dppo", "epsilon": 2e-4, "epsilon_high": 3e-4},
        NO_S2T
        | {"token_loss": "dppo", "aggregation": "constant", "max_length": LONGEST}
        | {"epsilon": 2e-4, "epsilon_high": 3e-4, "old_is_rollout": True, "correction": "off"},
    ),
    "sapo": (
        {"algorithm": "sapo"},
        NO_S2T | {"token_loss": "sapo", "aggregation": "sequence-mean"},
    ),
    "stare": (
        {"algorithm": "stare", "stare": {"target_entropy": 9.0}},
        NO_S2T | {"stare": (1.1, 1.0), "target_entropy": 9.0},
    ),
    "stare, both": (
        {"algorithm": "stare", "stare": BOTH},
        NO_S2T | {"stare": (1.1, 0.5), "target_entropy": 9.0, "surprising": 0.3},
    ),
    "icepop": (
        {"algorithm": "justrl", "sampler_correction": "icepop", "sampler_cap": 1.5},
        NO_S2T | {"correction": "icepop", "cap": 1.5},
    ),
    "stapo with sapo": ({"token_loss": "sapo"}, {"token_loss": "sapo"}),
    "stapo with everything": (
        EVERYTHING | {"top_entropy_quantile": 0.7},
        EVERYTHING | {"top": 0.7},
    ),
    "sequence-mask": (
        {"sampler_correction": "sequence-mask", "sampler_cap": 3.0},
        {"correction": "sequence-mask", "cap": 3.0},
    ),
    "no correction": ({"sampler_correction": "off"}, {"correction": "off"}),
    "rollout": ({"old_logprobs": "rollout"}, {"old_is_rollout": True, "correction": "off"}),
}
INVARIANT = {
    name: CASES[name][0]
    for name in (
        "stapo",
        "random",
        "20-entropy",
        "grpo",
        "dr-grpo",
        "cispo, low",
        "gspo",
        "dppo",
        "sapo",
        "stare, both",
        "icepop",
        "stapo with everything",
        "sequence-mask",
    )
} | {"paper-v1 of the current policy": {"s2t": {"preset": "paper-v1", "statistics": "current"}}}


def tolerance(case):
    """The product over a sequence adds up the rounding of its tokens' log-probabilities, and SAPO's
    gate multiplies it (with other draws 1.4e-6 with PEFT's layers, 1.7e-6 with fused ones)."""
    return 3e-6 if case in ("sequence-mask", "gspo", "sapo") else 1e-6
