import copy
import re
from pathlib import Path

import pytest
import yaml
from helpers import MINIMAL, ROOT
from make_config import reference

from stapo_lite.config import Config, Objective, load_config, load_eval_config, to_yaml
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
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith(f"# stapo {command} configs/{name}.yaml")
    assert second.startswith("# For: ")


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
PAPERS_OBJECTIVE = "s2t aggregation epsilon epsilon_high beta top_entropy_quantile scale_rewards"


@pytest.mark.parametrize("algorithm", PAPERS)
def test_algorithms_are_the_papers(algorithm):
    config = load_config(MINIMAL, [f"algorithm={algorithm}"])
    o, rollout = config.objective, config.rollout
    enabled, *values = (getattr(o, name) for name in PAPERS_OBJECTIVE.split())
    others = rollout.dynamic_sampling, config.reward.overlong_penalty
    assert (enabled.enabled, *values, *others) == PAPERS[algorithm]
    assert o.renormalize == (algorithm != "20-entropy")
    assert o.token_loss == (algorithm if algorithm in TOKEN_LOSSES else "clip")
    assert (o.stare.weight, o.stare.negative_weight) == (1.1 if algorithm == "stare" else 1.0, 1.0)
    assert config.reward.incorrect == (0.0 if algorithm == "maxrl" else -1.0)
    assert o.old_logprobs == ("rollout" if algorithm == "dppo" else "trainer")
    others = (o.entropy_coef, o.sampler_correction, o.sampler_cap, o.mask_truncated_completions)
    assert others == (0.0, "token-truncate", 2.0, False)
    assert (rollout.num_generations, rollout.temperature) == (8, 1.0)


S2T_PAPERS = {
    "paper": (True, 0.002, 0.75, "candidates", "low-entropy", 0.0),  # enabled, tau_p, quantile
    "paper-v1": (True, 0.002, 0.8, "all", "low-entropy", 0.0),
    "article": (True, 0.01, 0.05, "all", "low-entropy", 0.001),
    "full": (True, 0.002, 0.75, "candidates", "all", 0.0),
    "high-entropy": (True, 0.002, 0.75, "candidates", "high-entropy", 0.0),
    "random": (True, 0.002, 0.75, "candidates", "random", 0.0),
}


@pytest.mark.parametrize("preset", S2T_PAPERS)
def test_s2t_presets_are_the_papers(preset):
    objective = load_config(MINIMAL, [f"objective.s2t.preset={preset}"]).objective
    s2t, coefficient = objective.s2t, objective.entropy_coef
    values = (s2t.enabled, s2t.tau_p, s2t.quantile, s2t.population, s2t.silence, coefficient)
    assert values == S2T_PAPERS[preset]


def test_both_decodings_of_the_paper():
    for name, expected in (("training-aligned", (1.0, 1.0)), ("justrl", (0.7, 0.9))):
        rollout = load_eval_config(EVALUATION, [f"decoding={name}"]).rollout
        assert (rollout.temperature, rollout.top_p) == expected
    rollout = load_eval_config(EVALUATION, ["decoding=justrl", "rollout.top_p=0.8"]).rollout
    assert (rollout.temperature, rollout.top_p, rollout.max_completion_length) == (0.7, 0.8, 20480)


@pytest.mark.parametrize("algorithm", PAPERS)
def test_a_written_config_reads_back_field_by_field(algorithm, tmp_path):
    changes = ["objective.s2t.preset=article", "data.prompt_suffix=' é \\boxed{}'"]
    config = load_config(MINIMAL, [f"algorithm={algorithm}", *changes])
    # A baseline has no entropy bonus, whatever S2T preset it watches.
    bonus = 0.001 if algorithm == "stapo" else 0.0
    assert (config.objective.entropy_coef, config.objective.s2t.tau_p) == (bonus, 0.01)
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config
    assert yaml.safe_load(to_yaml(config)) == config.model_dump()
    explicit = yaml.safe_load(to_yaml(config)) | {"algorithm": "stapo"}
    assert load_config(explicit).objective == config.objective


def test_a_config_as_it_was_given_has_none_of_the_presets_keys():
    config = load_config(MINIMAL, ["algorithm=dapo", "objective.beta=0.1"])
    kept = yaml.safe_load(to_yaml(config, given=True))
    assert kept == MINIMAL | {"algorithm": "dapo", "objective": {"beta": 0.1}}
    assert load_config(kept) == config
    grpo = load_config(MINIMAL, ["algorithm=grpo", "objective.beta=0.1"])
    assert load_config(kept, ["algorithm=grpo"]) == grpo


def test_the_page_of_the_methods_names_the_keys_of_each():
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` (\(\[.*)$", page, re.MULTILINE))
    assert rows.keys() == PRESETS["algorithm"].keys()
    for algorithm, keys in PRESETS["algorithm"].items():
        for key in keys.keys() - {"objective.s2t.enabled", "objective.entropy_coef"}:
            assert f"`{key.removeprefix('objective.')}`" in rows[algorithm], key
    for command in re.findall(r"^\| `([\w.]+=[^`]+)` \|", page, re.MULTILINE):
        load_config(MINIMAL, command.split())


def test_a_given_field_wins_over_the_preset_wherever_it_stands():
    tree = MINIMAL | {"objective": {"beta": 0.1}, "algorithm": "grpo", "train": {"batch_size": 32}}
    given = copy.deepcopy(tree)
    changes = ["objective.epsilon_high=0.3", "objective.s2t.enabled=true"]
    # YAML reads text, and false.
    changes += ["train.learning_rate=3e-5", "objective.sampler_correction=off"]
    config = load_config(tree, changes)
    o, train = config.objective, config.train
    assert (o.beta, o.epsilon_high, o.s2t.enabled) == (0.1, 0.3, True)
    assert (o.aggregation, o.sampler_correction) == ("sequence-mean", "off")
    assert (train.learning_rate, train.batch_size) == (3e-5, 32)
    assert tree == given
    shared = Objective()  # presets fill no section of another config
    assert Config(**MINIMAL, algorithm="grpo", objective=shared).objective.beta == 0.04
    assert Config(**MINIMAL).objective == shared == Objective()


def test_a_key_in_python_needs_no_section():
    sections = [key for key in _keys(Config) if "." in key and not key.startswith("evaluation.")]
    own = [key.rpartition(".")[2] for key in sections]
    assert len(set(own)) == len(own)  # no name means two keys
    tree = {"lora": {"r": 8, "use_rslora": True}, **MINIMAL}
    short = {
        "learning_rate": 1e-5,
        "output_dir": Path("a/b"),
        "quantization": "nf4",  # the config's own, not the engine's
        "lora": {"r": 4},
        "chat_template_kwargs": {"enable_thinking": False},
        "data.chat_template_kwargs.tools": [{"name": "f"}],
        "evaluation": {"steps": 5, "temperature": 0.5},
    }
    config = load_config(tree, short)
    assert (config.train.learning_rate, config.output_dir) == (1e-5, "a/b")
    assert (config.quantization, config.rollout.quantization) == ("nf4", None)
    assert (config.lora.r, config.lora.use_rslora) == (4, True)
    kwargs = {"enable_thinking": False, "tools": [{"name": "f"}]}
    assert config.data.chat_template_kwargs == kwargs
    assert (config.evaluation.temperature, config.rollout.temperature) == (0.5, 1.0)
    with pytest.raises(InputError, match="unknown key 'max_step': did you mean 'train.max_steps'"):
        load_config(MINIMAL, {"max_step": 3})


@pytest.mark.parametrize(
    ("trainer", "engine", "same"),
    [
        ("null", "null", True),
        ("nf4", "bitsandbytes", True),
        ("nf4", "null", False),
        ("null", "bitsandbytes", False),
        ("null", "fp8", False),
        ("nf4", "fp8", False),
    ],
)
def test_trainer_and_engine_share_a_base_of_one_format_only(trainer, engine, same):
    given = [f"quantization={trainer}", f"rollout.quantization={engine}"]
    config = load_config(MINIMAL, given)
    assert (config.same_quantization, config.may_share_base) == (same, same)


def test_every_method_can_be_chosen():
    for name in PRESETS["algorithm"]:
        overrides = [f"algorithm={name}", "objective.teacher_server=http://a"]
        assert load_config(MINIMAL, overrides).algorithm == name


def test_overrides_apply_in_order_and_one_tracker_needs_no_list():
    assert load_config(MINIMAL, ["lora={r: 8}", "lora.r=4", "lora={r: 16}"]).lora.r == 16
    given = {"none": [], "[none]": [], "wandb": ["wandb"], "[wandb, trackio]": ["wandb", "trackio"]}
    for value, expected in given.items():
        assert load_config(MINIMAL, [f"log.report_to={value}"]).log.report_to == expected


BAD = {
    "beta=0.1": "unknown key 'beta': did you mean 'objective.beta'?",
    "temperature=1": "did you mean 'rollout.temperature' or 'evaluation.temperature'?",
    "reward_weights=[1]": "unknown key 'reward_weights': did you mean 'reward.weights'?",
    "train.lerning_rate=1": "unknown key 'train.lerning_rate': did you mean 'train.learning_rate'?",
    "objective.s2t.zzz=1": "unknown key 'objective.s2t.zzz': docs/config.md lists all",
    "algorithm=distill": "reward.functions=[], need a teacher: set objective.teacher_adapter or",
    "algorithm=distill reward.functions=[math]": "algorithm=distill, and reward.functions=[], need",
    "reward.functions=[]": "reward.functions=[], need a teacher",
    "train.batch_size=9 zzz=1 train.lerning_rate=1": "learning_rate'?; unknown key 'zzz'",
    "data.system_prompt=None": "key 'data.system_prompt': for no value write null, got 'None'",
    "data.chat_template_kwargs.day=2024-07-26": "key 'data.chat_template_kwargs.day",
    "stop_on=ratio": "key 'stop_on': input should be a valid list, got 'ratio'",
    "log.report_to=mlflow": "'tensorboard', 'wandb' or 'trackio', got 'mlflow'",
    "train.learning_rate=0": "key 'train.learning_rate'",
    "lora.r=513": "key 'lora.r'",
    "lora.target_modules=all": "key 'lora.target_modules'",
    "train=3": "key 'train'",
    "train.batch_size=10": "train.batch_size=10 is not divisible by train.mini_batch_size=16",
    "reward.weights=[1,2]": "reward.weights=[1.0, 2.0] for reward.functions=['math']: give one",
    "objective.sampler_cap=0.5": "key 'objective.sampler_cap'",
    "rollout.max_lag=1": "rollout.max_lag needs rollout.engine=server",
    "rollout.engine=server rollout.max_lag=1 objective.sampler_correction=off": "for older adapt",
    "rollout.vllm.tensor_parallel_size=2": "data_parallel_size need rollout.engine=server",
    "data.system_prompt=a data.apply_chat_template=off": "needs data.apply_chat_template=true",
}


@pytest.mark.parametrize("overrides", BAD)
def test_bad_values_name_the_key_and_the_fix_in_one_line(overrides):
    with pytest.raises(InputError) as error:
        load_config(MINIMAL, overrides.split())
    assert BAD[overrides] in str(error.value)
    assert "\n" not in str(error.value)


def test_configs_that_cannot_be_read():
    for name, cause in {"missing": "No such file", "a" * 300: "File name too long"}.items():
        with pytest.raises(InputError, match=rf"{name}: cannot be read as YAML \({cause}"):
            load_config(name)
    with pytest.raises(InputError, match="config: key 'output_dir' is required: add it"):
        load_config({"model": "m"})


def test_the_reference_is_generated_and_complete():
    rows = [line for line in reference().splitlines() if line.startswith("- `")]
    assert len(rows) > 100
    assert not [line for line in rows if line.endswith(": ")], "a field without docstring"
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == reference()
