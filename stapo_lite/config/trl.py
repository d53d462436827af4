"""Keys of TRL's GRPOConfig, ModelConfig and GRPOTrainer that have another name here, or no
counterpart: the error about an unknown key says which."""

_PROMPTS = "per_device_train_batch_size x gradient_accumulation_steps x processes / num_generations"

_WHOLE = "none: rollouts are sampled from the whole distribution, which the objective is about"

TRL_NAMES = {
    "model_name_or_path": "model",
    "dataset_name": "data.source",
    "dataset_config": "data.subset",
    "dataset_train_split": "data.split",
    "train_dataset": "data.source; in Python Trainer(train_dataset=...)",
    "eval_dataset": "evaluation.source, judged by the run's own reward functions",
    "eval_steps": "evaluation.steps",
    "eval_strategy": "evaluation.steps",
    "metric_for_best_model": "evaluation.best",
    "load_best_model_at_end": "evaluation.best",
    "num_generations_eval": "evaluation.num_samples",
    "per_device_eval_batch_size": "leave it out: rollout.max_num_seqs is for evaluations, too",
    "reward_funcs": "reward.functions; in Python Trainer(reward_funcs=...)",
    "reward_weights": "reward.weights",
    "load_in_4bit": "quantization: nf4",
    "bf16": "dtype: bfloat16",
    "fp16": "dtype: float16",
    "lora_r": "lora.r",
    "lora_target_modules": "lora.target_modules",
    "lora_dropout": (
        "leave it out: dropout would put noise into masks and log-probabilities, and the "
        "engine has none"
    ),
    "use_vllm": "rollout.engine",
    "vllm_mode": "rollout.engine: vllm for colocate, server for server",
    "vllm_server_base_url": "rollout.servers",
    "vllm_server_host": "rollout.servers",
    "vllm_server_port": "rollout.servers",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "vllm_enable_sleep_mode": "rollout.sleep_level",
    "vllm_max_model_length": "data.max_prompt_length + rollout.max_completion_length",
    "vllm_importance_sampling_correction": "objective.sampler_correction",
    "vllm_importance_sampling_mode": "objective.sampler_correction",
    "vllm_importance_sampling_cap": "objective.sampler_cap",
    "vllm_importance_sampling_clip_max": "objective.sampler_cap",
    "loss_type": (
        "algorithm, which sets objective.token_loss (cispo, sapo) and objective.aggregation: "
        "sequence-mean for grpo, token-mean for dapo, constant for dr_grpo"
    ),
    "per_device_train_batch_size": (
        f"train.mini_batch_size, in prompts: {_PROMPTS}; train.max_tokens_per_microbatch "
        "bounds the memory"
    ),
    "gradient_accumulation_steps": f"train.mini_batch_size, in prompts: {_PROMPTS}",
    "generation_batch_size": (
        "train.batch_size, in prompts: generation_batch_size / num_generations"
    ),
    "steps_per_generation": (
        "train.batch_size: steps_per_generation / gradient_accumulation_steps x "
        "train.mini_batch_size"
    ),
    "num_train_epochs": "train.max_steps: num_train_epochs x rows / train.batch_size",
    "num_iterations": "leave it out: each completion trains once",
    "shuffle_dataset": "leave it out: rows are always shuffled",
    "remove_unused_columns": "leave it out: reward functions get every column",
    "save_strategy": "log.save_steps",
    "adam_beta1": "none: 0.9, AdamW's default",
    "adam_beta2": "none: 0.999, AdamW's default",
    "adam_epsilon": "none: 1e-8, AdamW's default",
    "torch_compile": "train.compile",
    "top_p": f"{_WHOLE}; evaluation.top_p is an evaluation's",
    "top_k": _WHOLE,
    "min_p": _WHOLE,
    "repetition_penalty": _WHOLE,
    "generation_kwargs": _WHOLE,
    "delta": "none: the objective has no second clip",
    "importance_sampling_level": "algorithm: gspo for sequence",
    "vllm_importance_sampling_clip_min": (
        "objective.sampler_correction: icepop, which takes 1 / objective.sampler_cap"
    ),
    "multi_objective_aggregation": "none: rewards are added up by reward.weights",
    "sync_ref_model": "none: the reference stays",
    "use_dora": "none: lora.use_rslora is the only variant",
    "model_init_kwargs": "dtype and quantization",
    "attn_implementation": "leave it out: it is torch's scaled_dot_product_attention",
    "log_completions": "log.completions: how many are kept of each step",
    "num_completions_to_print": "log.log_completions_steps: how often two are printed",
    "callbacks": "in Python Trainer(callbacks=[...])",
    "args": "give its keys one by one; in Python Trainer(config=...) for all in one",
    "peft_config": "lora; in Python its keys one by one, such as Trainer(r=16, lora_alpha=32)",
    "processing_class": "none: the model's own tokenizer",
    "environment_factory": "rollout.function; in Python Trainer(rollout_func=...)",
    "max_tool_calling_iterations": "in Python episode.chat(max_turns=...)",
    "logging_steps": "leave it out: every step is logged",
    "logging_strategy": "leave it out: every step is logged",
    "hub_token": "leave it out: HF_TOKEN, or `hf auth login`",
    "gradient_checkpointing_kwargs": "leave it out",
    "use_liger_kernel": "leave it out: the LM head never holds all logits",
    "deepspeed": "none: each process has the whole base; quantization: nf4 makes it smaller",
    "fsdp": "none: each process has the whole base; quantization: nf4 makes it smaller",
    "data_seed": "seed",
    "push_to_hub": (
        "log.hub_model_id, or `stapo export --push-to-hub`; in Python Trainer.push_to_hub"
    ),
    "resume_from_checkpoint": "`stapo train --resume`",
}
"""TRL's name -> what to write here."""
