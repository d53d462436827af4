"""Arguments of TRL's GRPOTrainer for the settings of a config, shared by all comparisons with
TRL."""

import os
from typing import Any

import torch
from peft import LoraConfig
from trl import GRPOConfig

from stapo_lite.config import Config, Objective
from stapo_lite.model.adapter import name_layers
from stapo_lite.model.processes import resolve_dtype


def loss_arguments(objective: Objective) -> dict[str, Any]:
    """The fields of GRPOConfig that name the token loss and its mean."""
    means = {"token-mean": "dapo", "sequence-mean": "grpo", "constant": "dr_grpo"}
    kind, named = objective.token_loss, objective.token_loss in ("cispo", "sapo")
    return {
        "loss_type": kind if named else means[objective.aggregation],
        "importance_sampling_level": "sequence" if kind == "gspo" else "token",
        "epsilon": objective.epsilon,
        "epsilon_high": objective.epsilon_high + (kind == "cispo"),
    }


def trl_arguments(config: Config, **others: Any) -> dict[str, Any]:
    """Return the keyword arguments for GRPOTrainer that set model, adapter and GRPOConfig.

    Nothing is saved or reported. In TRL every row is as wide as the longest. A micro-batch gets as
    many rows as our token budget has room for, rounded down to a number that divides the
    mini-batch.

    Args:
        others: more fields of GRPOConfig.
    """
    dtype = resolve_dtype(config.dtype, config.rollout.quantization)
    lora, objective, train, rollout = config.lora, config.objective, config.train, config.rollout
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    completions = train.mini_batch_size * rollout.num_generations // processes
    most = train.max_tokens_per_microbatch
    rows = max(1, (16_384 if most == "auto" else most) // config.max_sequence_length)
    while completions % rows:
        rows -= 1
    arguments = GRPOConfig(
        output_dir=config.output_dir,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": dtype},
        bf16=dtype == "bfloat16",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=completions // rows,
        steps_per_generation=train.batch_size // train.mini_batch_size * completions // rows,
        gradient_checkpointing=bool(train.gradient_checkpointing),
        num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        **loss_arguments(objective),
        beta=objective.beta,
        scale_rewards=objective.scale_rewards,
        optim="adamw_torch_fused",
        max_grad_norm=train.max_grad_norm,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **others,
    )
    layers = name_layers(lora, config.model).target_modules
    peft = LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=layers)
    return {"model": config.model, "args": arguments, "peft_config": peft}
