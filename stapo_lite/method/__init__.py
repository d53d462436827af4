"""The paper as tensors: advantages, masks, objective, LM head, micro-batches. No model, no engine,
no files."""
