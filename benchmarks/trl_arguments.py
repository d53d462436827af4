"""TRL's GRPOTrainer with the settings of a config: the part that every comparison with it shares."""

from typing import Any

import torch
from peft import LoraConfig
from trl import GRPOConfig

from stapo_lite.config import Config
from stapo_lite.model.processes import resolve_dtype


def trl_arguments(config: Config, **others: Any) -> dict[str, Any]:
    """Its model, adapter and arguments: `loss_type="dapo"`, which is `justrl`, saved and reported nowhere. Every row is
    as wide as the longest, so a micro-batch has as many, of those that divide the mini-batch, as our tokens have room
    for.

    Args:
        others: of GRPOConfig.
    """
    dtype = resolve_dtype(config.dtype)
    lora, objective, train, rollout = config.lora, config.objective, config.train, config.rollout
    completions = train.mini_batch_size * rollout.num_generations
    rows = config.largest_microbatch // config.max_sequence_length
    rows = next(n for n in range(rows, 0, -1) if completions % n == 0)
    arguments = GRPOConfig(
        output_dir=config.output_dir,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": dtype},
        bf16=dtype == "bfloat16",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=completions // rows,
        steps_per_generation=train.batch_size * rollout.num_generations // rows,
        gradient_checkpointing=bool(train.gradient_checkpointing),
        num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        loss_type="dapo",
        epsilon=objective.epsilon,
        epsilon_high=objective.epsilon_high,
        beta=objective.beta,
        scale_rewards=objective.scale_rewards,
        optim="adamw_torch_fused",
        max_grad_norm=train.max_grad_norm,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **others,
    )
    peft = LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=list(lora.target_modules))
    return {"model": config.model, "args": arguments, "peft_config": peft}
