import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stapo_lite.config import Config, InputError, check_processes, load_config, load_eval_config, reference, to_yaml

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MINIMAL = {"model": "m", "output_dir": "o"}


@pytest.fixture
def write(tmp_path):
    def write(tree) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_opens_with_its_launch_command(path):
    load, command = (load_eval_config, "evaluate") if path.stem == "eval" else (load_config, "train")
    load(path)
    first, second, third = path.read_text(encoding="utf-8").splitlines()[:3]
    assert first.startswith(f"# accelerate launch -m stapo_lite.{command} configs/{path.name}")
    assert second.startswith("# For: ")
    assert third.startswith("# Expect: ")


def test_the_required_configs_are_there():
    names = {path.stem for path in CONFIGS}
    assert {"eval", "quickstart", "qwen1.7b_lora", "qwen8b_lora", "qwen8b_qlora", "qwen14b_qlora"} <= names


def test_defaults_are_the_papers():
    config = Config(**MINIMAL)
    s2t = config.objective.s2t
    assert (s2t.tau_p, s2t.quantile, s2t.population) == (0.002, 0.75, "candidates")
    assert (config.objective.epsilon, config.objective.epsilon_high) == (0.2, 0.28)
    assert (config.rollout.num_generations, config.rollout.temperature) == (8, 1.0)


# What the papers say, per preset; `objective.s2t.enabled` first.
PAPERS = {
    "stapo": (True, "token-mean", 0.2, 0.28, 0.0, 1.0, "group", False, 0.0),
    "grpo": (False, "sequence-mean", 0.2, 0.2, 0.04, 1.0, "group", False, 0.0),
    "dr-grpo": (False, "constant", 0.2, 0.2, 0.0, 1.0, "none", False, 0.0),
    "dapo": (False, "token-mean", 0.2, 0.28, 0.0, 1.0, "group", True, 1.0),
    "justrl": (False, "token-mean", 0.2, 0.28, 0.0, 1.0, "group", False, 0.0),
    "20-entropy": (False, "token-mean", 0.2, 0.28, 0.0, 0.2, "group", False, 0.0),
}


@pytest.mark.parametrize("algorithm", PAPERS)
def test_algorithms_are_the_papers(write, algorithm):
    config = load_config(write(MINIMAL), [f"algorithm={algorithm}"])
    o = config.objective
    values = (o.s2t.enabled, o.aggregation, o.epsilon, o.epsilon_high, o.beta, o.top_entropy_quantile, o.scale_rewards)
    assert (*values, config.rollout.dynamic_sampling, config.reward.overlong_penalty) == PAPERS[algorithm]
    assert o.renormalize == (algorithm != "20-entropy")
    assert (o.entropy_coef, o.old_logprobs, o.sampler_correction, o.sampler_cap) == (
        0.0,
        "trainer",
        "token-truncate",
        2.0,
    )


S2T_PAPERS = {
    "paper": (0.002, 0.75, "candidates", "low-entropy", 0.0),
    "paper-v1": (0.002, 0.8, "all", "low-entropy", 0.0),
    "article": (0.01, 0.05, "all", "low-entropy", 0.001),
    "full": (0.002, 0.75, "candidates", "all", 0.0),
    "high-entropy": (0.002, 0.75, "candidates", "high-entropy", 0.0),
    "random": (0.002, 0.75, "candidates", "random", 0.0),
}


@pytest.mark.parametrize("preset", S2T_PAPERS)
def test_s2t_presets_are_the_papers(write, preset):
    o = load_config(write(MINIMAL), [f"objective.s2t.preset={preset}"]).objective
    assert (o.s2t.tau_p, o.s2t.quantile, o.s2t.population, o.s2t.silence, o.entropy_coef) == S2T_PAPERS[preset]
    assert o.s2t.enabled


def test_a_given_field_wins_over_the_preset_wherever_it_stands(write):
    path = write(MINIMAL | {"objective": {"beta": 0.1}, "algorithm": "grpo"})
    config = load_config(path, ["objective.epsilon_high=0.3", "objective.s2t.enabled=true"])
    o = config.objective
    assert (o.beta, o.epsilon_high, o.s2t.enabled, o.aggregation) == (0.1, 0.3, True, "sequence-mean")


def test_another_algorithm_replaces_what_the_first_one_set_in_a_resolved_config(write):
    resolved = to_yaml(load_config(write(MINIMAL), ["algorithm=dapo", "objective.beta=0.1"]))
    config = load_config(write(resolved), ["algorithm=grpo"])
    expected = load_config(write(MINIMAL), ["algorithm=grpo", "objective.beta=0.1"])
    assert config == expected


def test_a_baseline_has_no_entropy_bonus_whatever_s2t_preset_it_watches(write):
    config = load_config(write(MINIMAL), ["algorithm=justrl", "objective.s2t.preset=article"])
    assert (config.objective.entropy_coef, config.objective.s2t.tau_p) == (0.0, 0.01)


@pytest.mark.parametrize("algorithm", PAPERS)
def test_a_resolved_preset_reads_back_field_by_field(write, algorithm):
    config = load_config(write(MINIMAL), [f"algorithm={algorithm}", "objective.s2t.preset=article"])
    assert load_config(write(to_yaml(config))) == config
    explicit = yaml.safe_load(to_yaml(config)) | {"algorithm": "stapo"}
    assert load_config(write(explicit)).objective == config.objective


def test_overrides_replace_and_add(write):
    path = write(MINIMAL | {"train": {"batch_size": 32}})
    config = load_config(
        path, ["train.learning_rate=3e-5", "train.max_steps=7", "log.report_to=[tensorboard]", "seed=3"]
    )
    assert config.train.learning_rate == 3e-5  # YAML reads 3e-5 as text
    assert (config.train.max_steps, config.train.batch_size, config.seed) == (7, 32, 3)
    assert config.log.report_to == ["tensorboard"]


def test_the_resolved_config_reads_back(write):
    config = load_config(ROOT / "configs" / "qwen8b_lora.yaml", ["data.prompt_suffix=' é \\boxed{}'"])
    assert load_config(write(to_yaml(config))) == config


BAD = [
    (
        {"rollout.sleep_level": 2, "rollout.quantization": "bitsandbytes"},
        "bitsandbytes weights again; set rollout.sleep_level=1",
    ),
    ({"lora.dtype": "bfloat16", "dtype": "float32"}, "lora.dtype=bfloat16 needs dtype=bfloat16"),
    (
        {"train.offload_activations": True, "train.gradient_checkpointing": False},
        "train.offload_activations needs train.gradient_checkpointing=true",
    ),
    ({"train.lerning_rate": 1}, r"unknown key 'train.lerning_rate': did you mean 'learning_rate'\?"),
    ({"trian": {}}, r"unknown key 'trian': did you mean 'train'\?"),
    ({"objective.s2t.zzz": 1}, "unknown key 'objective.s2t.zzz': allowed are preset, enabled, tau_p, quantile"),
    ({"train.learning_rate": "fast"}, "key 'train.learning_rate': input should be a valid number.*got 'fast'"),
    ({"train.learning_rate": 0}, "key 'train.learning_rate': input should be greater than 0"),
    ({"train.max_steps": 1.5}, "key 'train.max_steps': input should be a valid integer"),
    ({"rollout.num_generations": 1}, "key 'rollout.num_generations': input should be greater than or equal to 2"),
    ({"rollout.engine": "sglang"}, "key 'rollout.engine': input should be 'auto', 'vllm', 'server' or 'transformers'"),
    ({"lora.r": 513}, "key 'lora.r': input should be less than or equal to 512"),
    ({"lora.target_modules": ["lm_head"]}, "key 'lora.target_modules.0': input should be 'q_proj', .*got 'lm_head'"),
    ({"train": 3}, "key 'train': input should be a valid dictionary"),
    ({"model": None}, "key 'model': input should be a valid string"),
    (
        {"train.batch_size": 10, "train.mini_batch_size": 4},
        "train.batch_size=10 is not divisible by train.mini_batch_size=4",
    ),
    (
        {"train.max_tokens_per_microbatch": 100},
        "train.max_tokens_per_microbatch=100 is less than one sequence.* = 3072",
    ),
    ({"reward.weights": [1.0, 2.0]}, "reward.weights has 2 entries for 1 reward.functions"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_bad_values_name_the_key_and_the_fix_in_one_line(write, changes, message):
    overrides = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}" for key, value in changes.items()
    ]
    with pytest.raises(InputError) as error:
        load_config(write(MINIMAL), overrides)
    assert "\n" not in str(error.value)
    assert re.search(message, str(error.value)), error.value


def test_bad_files_and_overrides(write, tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml: no such config file"):
        load_config(tmp_path / "nowhere.yaml")
    for text in ("a: [1", "- 1", "", "\x00"):
        with pytest.raises(InputError, match=r"c\.yaml: (cannot be read as YAML|must be a YAML mapping)"):
            load_config(write(text))
    with pytest.raises(InputError, match="key 'output_dir' is required"):
        load_config(write({"model": "m"}))
    for override, message in (("train", "key.sub=value"), ("model.x=1", "model is a value"), ("seed=[", "not YAML")):
        with pytest.raises(InputError, match=message):
            load_config(write(MINIMAL), [override])


def test_both_decodings_of_the_paper(write):
    path = write({"model": "m", "output_dir": "o"})
    both = [load_eval_config(path, [f"decoding={name}"]).rollout for name in ("training-aligned", "justrl")]
    assert [(r.temperature, r.top_p) for r in both] == [(1.0, 1.0), (0.7, 0.9)]
    rollout = load_eval_config(path, ["decoding=justrl", "rollout.top_p=0.8"]).rollout
    assert (rollout.temperature, rollout.top_p, rollout.max_completion_length) == (0.7, 0.8, 20480)
    with pytest.raises(InputError, match="unknown key 'rollout.num_generations'"):
        load_eval_config(path, ["rollout.num_generations=4"])
    with pytest.raises(InputError, match="unknown key 'decodings': did you mean 'decoding'"):
        load_eval_config(path, ["decodings=justrl"])


def test_every_process_has_a_prompt():
    config = Config(**MINIMAL)
    check_processes(config, 7)
    with pytest.raises(InputError, match="train.batch_size=64 is less than the 65 processes"):
        check_processes(config, 65)


def test_the_reference_is_generated_and_complete():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == reference()
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert all(line.rstrip(" |").split("| ")[-1] != "" for line in rows)
    assert not [line for line in rows if line.endswith("|  |")], "a field without docstring"


def test_importing_the_package_needs_neither_torch_nor_vllm():
    code = (
        "import sys, stapo_lite, stapo_lite.config, stapo_lite.rewards; assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
