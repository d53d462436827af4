"""The same tensors through TRL's trainer: loss and gradient of each objective that both have."""

import inspect
import re

import pytest
import torch
from helpers import (
    ADVANTAGES,
    LONGEST,
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

from stapo_lite.method.loss import sampler_correction

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[test]'")

DAPO = {"loss_type": "dapo", "epsilon_high": 0.28}
CASES = {
    # ours -> TRL's
    "grpo": (
        {"algorithm": "grpo"},
        {"loss_type": "grpo", "beta": 0.04, "epsilon_high": 0.2, "use_bias_correction_kl": False},
    ),
    "dapo": ({"algorithm": "dapo"}, DAPO),
    "dr-grpo": ({"algorithm": "dr-grpo"}, {"loss_type": "dr_grpo", "epsilon_high": 0.2}),
    "20-entropy": (
        {"algorithm": "20-entropy", "s2t": {"statistics": "current"}},
        DAPO | {"top_entropy_quantile": 0.2},
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
    "icepop": ({"algorithm": "dapo", "sampler_correction": "icepop"}, DAPO),
    "no clip-higher, sequence mask": (
        {"algorithm": "dapo", "sampler_correction": "sequence-mask", "epsilon_high": 0.2},
        DAPO | {"epsilon_high": 0.2},
    ),
}


def trl_trainer(model, folder, **arguments):
    from datasets import Dataset

    sizes = {"max_completion_length": LONGEST, "num_generations": len(ADVANTAGES)}
    sizes["per_device_train_batch_size"] = len(ADVANTAGES)
    plain = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": []}
    options = {"output_dir": str(folder), "temperature": SAMPLING.temperature}
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0],
        args=trl.GRPOConfig(**options, **sizes, **plain, **arguments),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
    )
    # It has weights for the engine's tokens.
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def pad(rows, side="right"):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)


def trl_tensors(completions, old, reference, correction):
    """TRL's layout: prompts padded on the left, completions on the right."""
    prompts = [torch.tensor(c.prompt.token_ids) for c in completions]
    answers = [torch.tensor(c.token_ids) for c in completions]
    return {
        "prompt_ids": pad(prompts, "left"),
        "prompt_mask": pad([torch.ones_like(p) for p in prompts], "left"),
        "completion_ids": pad(answers),
        "completion_mask": pad([torch.ones_like(a) for a in answers]),
        "advantages": torch.tensor([c.advantage for c in completions]),
        "old_per_token_logps": pad([old[c].logprobs for c in completions]),
        "ref_per_token_logps": pad([reference[c].logprobs for c in completions]),
        "importance_sampling_ratio": pad(correction.split([len(a) for a in answers])),
        "num_items_in_batch": torch.tensor(sum(len(a) for a in answers)),
    }


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_agree(tiny_model, tmp_path, case):
    ours, theirs = CASES[case]
    policy, preset = adapted_policy(tiny_model), objective(**ours)
    completions, old = later_update(policy)
    with policy.model.disable_adapter():
        reference = measured(policy, completions)
    trainer = trl_trainer(policy.model, tmp_path, **theirs)
    batch = packed(policy, completions, old)
    logprobs = batch.old.logprobs, batch.rollout_logprobs
    settings = preset.sampler_correction, preset.sampler_cap
    correction, capped = sampler_correction(*logprobs, batch.owner, len(completions), *settings)
    assert capped.any()
    policy.model.zero_grad()
    tensors = trl_tensors(completions, old, reference, correction)
    loss = trainer._compute_loss(policy.model, tensors)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters.values()])
    policy.model.zero_grad()
    gradient, metrics, _ = run_update(policy, completions, preset, old=old, max_tokens=40)
    assert metrics["clip_low_share"] + metrics["clip_high_share"] > 0 or case == "sapo"
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative(gradient, expected) < 1e-5


def test_the_metrics_that_the_page_names_are_ours_and_theirs():
    page = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
    names = page[page.index("Other names, with TRL's:") :]
    rows = re.findall(r"^- `(\S+)`: `(\S+)`$", names, re.MULTILINE)
    assert len(rows) == names.count("\n- ") > 5
    ours = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name, _ in rows if f"`{name}`" not in ours] == []
    source = inspect.getsource(trl.GRPOTrainer)
    by_transformers = {"loss", "grad_norm", "learning_rate"}
    unknown = {name for _, name in rows if f'"{name}"' not in source and f'f"{name}"' not in source}
    assert unknown - by_transformers == set()
