"""The same tensors through TRL's trainer: where it has the same objective, loss and gradient
agree."""

import dataclasses
import inspect
import re

import pytest
import torch
from helpers import (
    ADVANTAGES,
    LONGEST,
    MINIMAL,
    ROOT,
    SAMPLING,
    adapted_policy,
    later_update,
    measured,
    objective,
    packed,
    relative,
    run_update,
)

from stapo_lite.algorithm.objective import sampler_correction
from stapo_lite.config import flatten, load_config
from stapo_lite.config.trl import TRL_NAMES

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[test]'")

CASES = {
    # ours -> TRL's
    "grpo": (
        {"algorithm": "grpo"},
        {"loss_type": "grpo", "beta": 0.04, "epsilon_high": 0.2, "use_bias_correction_kl": False},
    ),
    "dapo": ({"algorithm": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr-grpo": ({"algorithm": "dr-grpo"}, {"loss_type": "dr_grpo", "epsilon_high": 0.2}),
    "20-entropy": (
        {"algorithm": "20-entropy", "s2t": {"statistics": "current"}},
        {"loss_type": "dapo", "epsilon_high": 0.28, "top_entropy_quantile": 0.2},
    ),
    # TRL's bound is the ratio itself, ours what it may rise by.
    "cispo": (
        {"algorithm": "cispo", "epsilon_high": 0.28},
        {"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    "gspo": (
        {"algorithm": "gspo", "sampler_correction": "sequence-mask", "sampler_cap": 3.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        | {"epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "sapo": ({"algorithm": "sapo"}, {"loss_type": "sapo"}),
    "icepop": (
        {"algorithm": "dapo", "sampler_correction": "icepop"},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "no clip-higher, sequence mask": (
        {"algorithm": "dapo", "sampler_correction": "sequence-mask", "epsilon_high": 0.2},
        {"loss_type": "dapo", "epsilon_high": 0.2},
    ),
}


def trl_trainer(model, folder, **arguments):
    from datasets import Dataset

    arguments |= {
        "max_completion_length": LONGEST,
        "num_generations": len(ADVANTAGES),
        "bf16": False,
        "use_cpu": True,
    }
    arguments |= {"per_device_train_batch_size": len(ADVANTAGES), "gradient_checkpointing": False}
    config = trl.GRPOConfig(
        output_dir=str(folder), temperature=SAMPLING.temperature, report_to=[], **arguments
    )
    dataset = Dataset.from_dict({"prompt": ["a"]})
    return trl.GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [0.0], args=config, train_dataset=dataset
    )


def trl_tensors(completions, old, reference, correction):
    """TRL's layout: prompts padded on the left, completions on the right."""

    def pad(rows, side, value=0.0):
        return torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=value, padding_side=side
        )

    prompts = [torch.tensor(c.prompt.token_ids) for c in completions]
    answers = [torch.tensor(c.token_ids) for c in completions]
    return {
        "prompt_ids": pad(prompts, "left", 0),
        "prompt_mask": pad([torch.ones_like(p) for p in prompts], "left", 0),
        "completion_ids": pad(answers, "right", 0),
        "completion_mask": pad([torch.ones_like(a) for a in answers], "right", 0),
        "advantages": torch.tensor([c.advantage for c in completions]),
        "old_per_token_logps": pad([old[c].logprobs for c in completions], "right"),
        "ref_per_token_logps": pad([reference[c].logprobs for c in completions], "right"),
        "importance_sampling_ratio": correction,
        "num_items_in_batch": torch.tensor(sum(len(a) for a in answers)),
    }


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_agree(tiny_model, tmp_path, case):
    ours, theirs = CASES[case]
    policy = adapted_policy(tiny_model)
    completions, old = later_update(policy)
    with policy.model.disable_adapter():
        reference = measured(policy, completions)
    preset = objective(**ours)
    trainer = trl_trainer(policy.model, tmp_path, **theirs)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = (
        True  # it has weights for the engine's tokens
    )
    trainer.current_gradient_accumulation_steps = 1
    batch = packed(policy, completions, old)
    correction, capped = sampler_correction(
        batch.old.logprobs,
        batch.rollout_logprobs,
        batch.rows,
        len(completions),
        preset.sampler_correction,
        preset.sampler_cap,
    )
    correction = torch.nn.utils.rnn.pad_sequence(
        correction.split([len(c.token_ids) for c in completions]), True
    )
    assert capped.any()
    tensors = trl_tensors(completions, old, reference, correction)
    policy.model.zero_grad()
    loss = trainer._compute_loss(policy.model, tensors)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters.values()])
    policy.model.zero_grad()

    gradient, metrics, _ = run_update(policy, completions, preset, old=old, max_tokens=40)
    assert metrics["clipped_low"] + metrics["clipped_high"] > 0 or case == "sapo"
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative(gradient, expected) < 1e-5


def test_names_of_trl_are_its_and_lead_to_keys():
    keys = flatten(load_config(MINIMAL).model_dump())
    sections = "|".join(
        name for name, value in load_config(MINIMAL).model_dump().items() if isinstance(value, dict)
    )
    spoken_of = {
        key for here in TRL_NAMES.values() for key in re.findall(rf"\b(?:{sections})\.[\w.]+", here)
    }
    assert {key for key in spoken_of if key not in keys} == {"rollout.vllm.tensor_parallel_size"}
    configs = [trl.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig, trl.ScriptArguments]
    theirs = {field.name for config in configs for field in dataclasses.fields(config)}
    theirs |= set(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    assert TRL_NAMES.keys() - theirs == set()


def test_the_metrics_that_the_page_names_are_ours_and_theirs():
    page = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
    table = page[page.index("| our metric | TRL's |") :]
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \|$", table, re.MULTILINE)
    assert len(rows) == table.count("\n| `")
    ours = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name, _ in rows if f"`{name}`" not in ours] == []
    source = inspect.getsource(trl.GRPOTrainer)
    by_transformers = {"loss", "grad_norm", "learning_rate"}
    unknown = {name for _, name in rows if f'"{name}"' not in source and f'f"{name}"' not in source}
    assert unknown - by_transformers == set()
