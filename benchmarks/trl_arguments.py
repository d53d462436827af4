"""TRL's GRPOTrainer with the settings of a config: the part that every comparison with it shares."""

from typing import Any

import torch
from peft import LoraConfig
from trl import GRPOConfig

from stapo_lite.config import Config


def trl_arguments(config: Config, **others: Any) -> dict[str, Any]:
    """Its model, adapter and arguments: `loss_type="dapo"`, which is `justrl`, saved and reported nowhere.

    Args:
        others: of GRPOConfig.
    """
    lora, objective, train, rollout = config.lora, config.objective, config.train, config.rollout
    arguments = GRPOConfig(
        output_dir=config.output_dir,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": config.dtype},
        bf16=config.dtype == "bfloat16",
        gradient_checkpointing=bool(train.gradient_checkpointing),
        num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        loss_type="dapo",
        epsilon=objective.epsilon,
        epsilon_high=objective.epsilon_high,
        beta=objective.beta,
        scale_rewards=objective.scale_rewards,
        max_grad_norm=train.max_grad_norm,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **others,
    )
    peft = LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=list(lora.target_modules))
    return {"model": config.model, "args": arguments, "peft_config": peft}
