import copy
import re
from pathlib import Path

import pytest
import yaml
from helpers import MINIMAL, ROOT
from make_config import reference

from stapo_lite.config import (
    Config,
    Objective,
    check_processes,
    load_config,
    load_eval_config,
    to_yaml,
)
from stapo_lite.config.loading import _keys
from stapo_lite.config.presets import PRESETS
from stapo_lite.errors import InputError

REQUIRED = {"eval", "quickstart", "qwen1.7b_lora", "qwen8b_lora", "qwen8b_qlora", "qwen14b_qlora"}
CONFIGS = sorted(REQUIRED | {path.stem for path in (ROOT / "configs").glob("*.yaml")})
EVALUATION = {"model": "m", "output_dir": "o"}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_loads_and_opens_with_its_launch_command(name):
    load, command = (load_eval_config, "evaluate") if name == "eval" else (load_config, "train")
    path = ROOT / "configs" / f"{name}.yaml"
    load(path)
    first, second, third = path.read_text(encoding="utf-8").splitlines()[:3]
    assert first.startswith(f"# stapo {command} configs/{name}.yaml")
    assert second.startswith("# For: ")
    assert third.startswith("# Expect: ")


# What the papers say, per preset; `objective.s2t.enabled` first.
PAPERS = {
    "stapo": (True, "token-mean", 0.2, 0.28, 0.0, 1.0, "group", False, 0.0),
    "grpo": (False, "sequence-mean", 0.2, 0.2, 0.04, 1.0, "group", False, 0.0),
    "dr-grpo": (False, "constant", 0.2, 0.2, 0.0, 1.0, "none", False, 0.0),
    "dapo": (False, "token-mean", 0.2, 0.28, 0.0, 1.0, "group", True, 1.0),
    "justrl": (False, "token-mean", 0.2, 0.28, 0.0, 1.0, "group", False, 0.0),
    "20-entropy": (False, "token-mean", 0.2, 0.28, 0.0, 0.2, "group", False, 0.0),
    "cispo": (False, "token-mean", 1.0, 4.0, 0.0, 1.0, "group", False, 0.0),
    "gspo": (False, "sequence-mean", 3e-4, 4e-4, 0.0, 1.0, "group", False, 0.0),
    "dppo": (False, "constant", 0.15, 0.15, 0.0, 1.0, "none", False, 0.0),
    "sapo": (False, "sequence-mean", 0.2, 0.28, 0.0, 1.0, "group", False, 0.0),
    "maxrl": (False, "token-mean", 0.2, 0.28, 0.0, 1.0, "mean", False, 0.0),
    "stare": (False, "token-mean", 0.2, 0.28, 0.0, 1.0, "group", False, 0.0),
}
TOKEN_LOSSES = ("cispo", "gspo", "dppo", "sapo")


@pytest.mark.parametrize("algorithm", PAPERS)
def test_algorithms_are_the_papers_and_read_back_field_by_field(algorithm, tmp_path):
    config = load_config(MINIMAL, [f"algorithm={algorithm}"])
    o, rollout = config.objective, config.rollout
    values = (
        o.s2t.enabled,
        o.aggregation,
        o.epsilon,
        o.epsilon_high,
        o.beta,
        o.top_entropy_quantile,
        o.scale_rewards,
    )
    assert (*values, rollout.dynamic_sampling, config.reward.overlong_penalty) == PAPERS[algorithm]
    assert o.renormalize == (algorithm != "20-entropy")
    assert o.token_loss == (algorithm if algorithm in TOKEN_LOSSES else "clip")
    assert (o.stare.weight, o.stare.negative_weight) == (1.1 if algorithm == "stare" else 1.0, 1.0)
    assert config.reward.incorrect == (0.0 if algorithm == "maxrl" else -1.0)
    assert o.old_logprobs == ("rollout" if algorithm == "dppo" else "trainer")
    others = (o.entropy_coef, o.sampler_correction, o.sampler_cap, o.mask_truncated_completions)
    assert others == (0.0, "token-truncate", 2.0, False)
    assert (rollout.num_generations, rollout.temperature) == (8, 1.0)
    changes = [
        f"algorithm={algorithm}",
        "objective.s2t.preset=article",
        "data.prompt_suffix=' é \\boxed{}'",
    ]
    config = load_config(MINIMAL, changes)
    # a baseline has no entropy bonus whatever S2T preset it watches
    assert (config.objective.entropy_coef, config.objective.s2t.tau_p) == (
        0.001 * (algorithm == "stapo"),
        0.01,
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config
    explicit = yaml.safe_load(to_yaml(config)) | {"algorithm": "stapo"}
    assert load_config(explicit).objective == config.objective


S2T_PAPERS = {
    "paper": (0.002, 0.75, "candidates", "low-entropy", 0.0),
    "paper-v1": (0.002, 0.8, "all", "low-entropy", 0.0),
    "article": (0.01, 0.05, "all", "low-entropy", 0.001),
    "full": (0.002, 0.75, "candidates", "all", 0.0),
    "high-entropy": (0.002, 0.75, "candidates", "high-entropy", 0.0),
    "random": (0.002, 0.75, "candidates", "random", 0.0),
}


@pytest.mark.parametrize("preset", S2T_PAPERS)
def test_s2t_presets_are_the_papers(preset):
    o = load_config(MINIMAL, [f"objective.s2t.preset={preset}"]).objective
    assert (
        o.s2t.tau_p,
        o.s2t.quantile,
        o.s2t.population,
        o.s2t.silence,
        o.entropy_coef,
    ) == S2T_PAPERS[preset]
    assert o.s2t.enabled


def test_all_unknown_keys_are_named_before_other_mistakes():
    with pytest.raises(InputError) as error:
        load_config(MINIMAL, ["train.batch_size=10", "bf16=true", "zzz=1", "train.lerning_rate=1"])
    assert str(error.value) == (
        "config: unknown key 'train.lerning_rate': did you mean 'train.learning_rate'?; unknown "
        "key 'bf16': TRL's name; here dtype: bfloat16; unknown key 'zzz'"
    )


def test_the_page_of_the_methods_has_a_row_for_each_with_the_keys_that_it_sets():
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` (\(\[.*)$", page, re.MULTILINE))
    algorithms = PRESETS["algorithm"]
    assert rows.keys() == algorithms.keys()
    for algorithm, keys in algorithms.items():
        for key in keys.keys() - {"objective.s2t.enabled", "objective.entropy_coef"}:
            assert f"`{key.removeprefix('objective.')}`" in rows[algorithm], key
    for command in re.findall(r"^\| `([\w.]+=[^`]+)` \|", page, re.MULTILINE):
        load_config(MINIMAL, command.split())


def test_the_mean_reward_divides_rewards_that_are_not_negative():
    with pytest.raises(InputError, match="scale_rewards=mean divides .* set reward.incorrect=0"):
        load_config(MINIMAL | {"reward": {"incorrect": -1.0}}, ["algorithm=maxrl"])
    assert load_config(MINIMAL, ["algorithm=maxrl"]).objective.scale_rewards == "mean"
    with pytest.raises(InputError, match="leave reward.overlong_penalty out"):
        load_config(MINIMAL, ["algorithm=maxrl", "reward.overlong_penalty=1"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", []),
        ("[none]", []),
        ("wandb", ["wandb"]),
        ("[wandb, trackio]", ["wandb", "trackio"]),
    ],
)
def test_one_tracker_needs_no_list(given, expected):
    assert load_config(MINIMAL, [f"log.report_to={given}"]).log.report_to == expected


def test_an_unknown_tracker_is_refused():
    with pytest.raises(InputError, match="'tensorboard', 'wandb' or 'trackio', got 'mlflow'"):
        load_config(MINIMAL, ["log.report_to=mlflow"])


def test_the_window_is_of_the_papers_mask():
    window = "objective.s2t.window=8"
    with pytest.raises(InputError, match="window=8 remembers entropies of candidates"):
        load_config(MINIMAL, [window, "objective.s2t.preset=paper-v1"])
    assert load_config(MINIMAL, [window]).objective.s2t.window == 8


def test_a_given_field_wins_over_the_preset_wherever_it_stands():
    tree = MINIMAL | {"objective": {"beta": 0.1}, "algorithm": "grpo", "train": {"batch_size": 32}}
    given = copy.deepcopy(tree)
    changes = ["objective.epsilon_high=0.3", "objective.s2t.enabled=true"]
    changes += [
        "train.learning_rate=3e-5",
        "objective.sampler_correction=off",
    ]  # YAML reads text, and false
    config = load_config(tree, changes)
    o = config.objective
    assert (o.beta, o.epsilon_high, o.s2t.enabled, o.aggregation) == (
        0.1,
        0.3,
        True,
        "sequence-mean",
    )
    assert (config.train.learning_rate, config.train.batch_size, o.sampler_correction) == (
        3e-5,
        32,
        "off",
    )
    assert tree == given


def test_presets_fill_no_section_of_another_config():
    shared = Objective()
    grpo = Config(**MINIMAL, algorithm="grpo", objective=shared)
    assert (grpo.objective.beta, shared.beta) == (0.04, 0.0)
    assert Config(**MINIMAL).objective == Objective()


def test_a_key_in_python_needs_no_section():
    keys = [key for key in _keys(Config) if "." in key and not key.startswith("evaluation.")]
    own = [key.rpartition(".")[2] for key in keys]
    assert len(set(own)) == len(own)  # no name means two keys
    tree = {"lora": {"r": 8, "use_rslora": True}, **MINIMAL}
    short = {
        "learning_rate": 1e-5,
        "tau_p": 0.01,
        "quantization": "nf4",  # the config's own, not the engine's
        "lora": {"r": 4},
        "chat_template_kwargs": {"enable_thinking": False},
        "data.chat_template_kwargs.tools": [{"name": "f"}],
        "evaluation": {"steps": 5, "temperature": 0.5},
    }
    config = load_config(tree, short)
    assert (config.train.learning_rate, config.objective.s2t.tau_p) == (1e-5, 0.01)
    assert (config.quantization, config.rollout.quantization) == ("nf4", None)
    assert (config.lora.r, config.lora.use_rslora) == (4, True)
    kwargs = {"enable_thinking": False, "tools": [{"name": "f"}]}
    assert config.data.chat_template_kwargs == kwargs
    assert (config.evaluation.temperature, config.rollout.temperature) == (0.5, 1.0)
    with pytest.raises(InputError, match="unknown key 'max_step': did you mean 'train.max_steps'"):
        load_config(MINIMAL, {"max_step": 3})


def test_overrides_apply_in_order_and_a_path_is_text():
    overrides = ["lora={r: 8}", "lora.r=4", "lora={r: 16}"]
    assert load_config(MINIMAL, overrides).lora.r == 16
    assert load_config(MINIMAL, {"output_dir": Path("a/b")}).output_dir == "a/b"


def test_a_config_is_kept_as_it_was_given():
    """What presets set does not count, so that another algorithm can replace it."""
    config = load_config(MINIMAL, ["algorithm=dapo", "objective.beta=0.1"])
    kept = yaml.safe_load(to_yaml(config, given=True))
    assert kept == MINIMAL | {"algorithm": "dapo", "objective": {"beta": 0.1}}
    assert load_config(kept) == config
    assert load_config(kept, ["algorithm=grpo"]) == load_config(
        MINIMAL, ["algorithm=grpo", "objective.beta=0.1"]
    )
    assert yaml.safe_load(to_yaml(config)) == config.model_dump()


FORBIDDEN = [
    "train.learning_rate=0",
    "rollout.engine=sglang",
    "lora.r=513",
    "lora.target_modules=all",
    "train=3",
]
BAD = [
    (["beta=0.1"], "unknown key 'beta': did you mean 'objective.beta'?"),
    (
        ["temperature=1"],
        "unknown key 'temperature': did you mean 'rollout.temperature' or "
        "'evaluation.temperature'?",
    ),
    (
        ["train.reward_funcs=f"],
        "unknown key 'train.reward_funcs': TRL's name; here reward.functions; in Python",
    ),
    (
        ["lora.lora_dropout=0.1"],
        "unknown key 'lora.lora_dropout': TRL's name; here leave it out: dropout would put noise",
    ),
    (["evaluation.best=reward"], "evaluation.source and evaluation.best need evaluation.steps"),
    (
        ["train.lerning_rate=1"],
        "unknown key 'train.lerning_rate': did you mean 'train.learning_rate'?",
    ),
    (
        ["objective.s2t.zzz=1"],
        "unknown key 'objective.s2t.zzz': allowed are preset, enabled, tau_p, quantile",
    ),
    (["log.completions=true"], "key 'log.completions': must be a number, got True"),
    (["data.system_prompt=None"], "key 'data.system_prompt': for no value write null, got 'None'"),
    (["evaluation.limit=yes"], "key 'evaluation.limit': must be a number, got True"),
    (["rollout.sleep_level=on"], "key 'rollout.sleep_level': must be a number, got True"),
    (
        ["stop_on=ratio"],
        "key 'stop_on': input should be a valid list, got 'ratio': write [ratio]",
    ),
    (
        ["rollout.top_p=0.9"],
        "TRL's name; here none: rollouts are sampled from the whole distribution",
    ),
    (["train.learning_rate=fast"], "key 'train.learning_rate': input should be a valid number"),
    *(([value], f"key '{value.partition('=')[0]}") for value in FORBIDDEN),
    (
        ["train.batch_size=10"],
        "train.batch_size=10 is not divisible by train.mini_batch_size=16: choose a divisor, such",
    ),
    (
        ["reward.weights=[1, 2]"],
        "reward.weights=[1.0, 2.0] for reward.functions=['math']: give one weight",
    ),
    (
        ["rollout.max_num_seqs=7"],
        "rollout.max_num_seqs=7 is less than one group, rollout.num_generations=8",
    ),
    (["rollout.sleep_level=2", "rollout.quantization=bitsandbytes"], "set rollout.sleep_level=1"),
    (["rollout.share_base=[1]"], "input should be 'auto', 'on' or 'off', got [1]"),
    (["rollout.share_base=1"], "input should be 'auto', 'on' or 'off', got 1"),
    *(
        (
            ["rollout.share_base=on", change],
            "set rollout.engine=vllm and rollout.quantization=null, and leave out rollout.model",
        )
        for change in (
            "rollout.engine=transformers",
            "rollout.model=other",
            "rollout.quantization=fp8",
            "train.park_trainer=true",
        )
    ),
    (
        ["rollout.share_base=on", "quantization=nf4"],
        "set rollout.engine=vllm and rollout.quantization=bitsandbytes, and leave out",
    ),
    (
        ["rollout.vllm.kv_cache_memory_bytes=4G"],
        "rollout.vllm.kv_cache_memory_bytes=4G: must be a whole number",
    ),
    (
        ["rollout.engine=server", "rollout.vllm.tensor_parallel_size=0"],
        "rollout.vllm.tensor_parallel_size=0: must be a whole number above 0",
    ),
    (["rollout.max_lag=1"], "rollout.max_lag needs rollout.engine=server"),
    (
        ["rollout.vllm.tensor_parallel_size=2"],
        "rollout.vllm.tensor_parallel_size and data_parallel_size need rollout.engine=server",
    ),
    (
        ["train.offload_activations=true", "train.gradient_checkpointing=false"],
        "train.gradient_checkpointing=true",
    ),
    (
        ["objective.s2t={target_share: 0.1, enabled: false}"],
        "target_share needs objective.s2t.enabled=true",
    ),
    (
        ["data={source: a, system_prompt: a, apply_chat_template: false}"],
        "needs data.apply_chat_template=true",
    ),
    (
        ["rollout.engine=server", "train.park_trainer=true"],
        "train.park_trainer=true needs vLLM in the process",
    ),
    (
        ["rollout={engine: server, max_lag: 1}", "objective.sampler_correction='off'"],
        "needs a correction for older",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), BAD)
def test_bad_values_name_the_key_and_the_fix_in_one_line(overrides, message):
    with pytest.raises(InputError) as error:
        load_config(MINIMAL, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_both_decodings_of_the_paper():
    both = [
        load_eval_config(EVALUATION, [f"decoding={name}"]).rollout
        for name in ("training-aligned", "justrl")
    ]
    assert [(r.temperature, r.top_p) for r in both] == [(1.0, 1.0), (0.7, 0.9)]
    rollout = load_eval_config(EVALUATION, ["decoding=justrl", "rollout.top_p=0.8"]).rollout
    assert (rollout.temperature, rollout.top_p, rollout.max_completion_length) == (0.7, 0.8, 20480)
    with pytest.raises(InputError, match="unknown key 'rollout.num_generations'"):
        load_eval_config(EVALUATION, ["rollout.num_generations=4"])


def test_every_process_has_a_prompt():
    check_processes(Config(**MINIMAL), 64)
    with pytest.raises(InputError, match="train.batch_size=64 is less than the 65 processes"):
        check_processes(Config(**MINIMAL), 65)


def test_the_reference_is_generated_and_complete():
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert not [line for line in rows if line.endswith("|  |")], "a field without docstring"
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == reference()


def test_a_name_that_no_file_can_have():
    with pytest.raises(InputError, match=r"cannot be read as YAML \(File name too long\)"):
        load_config("a" * 300)
