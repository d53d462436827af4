"""Run by test_update.py in two processes: rank 1 holds only completions of zero advantage."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two processes with two threads each fight for two cores

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SAMPLING, fake_completions, randomise_adapter
from test_update import ADVANTAGES, objective, run_update

from stapo_lite.config import PROJECTIONS
from stapo_lite.policy import load_policy

tiny_model, out = sys.argv[1], Path(sys.argv[2])
accelerator = Accelerator(cpu=True)
policy = load_policy(
    tiny_model, dtype=torch.float32, quantization=None, lora_r=8, lora_alpha=16, target_modules=PROJECTIONS,
    gradient_checkpointing=False, temperature=SAMPLING.temperature, pad_token_id=0, lm_head_memory_bytes=1 << 20,
    device=accelerator.device, seed=0,
)  # fmt: skip
randomise_adapter(policy, seed=1)
completions = fake_completions(3, ADVANTAGES)
mine = [c for c in completions if (c.advantage == 0) == (accelerator.process_index == 1)]
gradient, metrics, _ = run_update(policy, mine, objective())
torch.save(
    {"gradient": gradient, "metrics": metrics, "world_size": accelerator.num_processes},
    out / f"{accelerator.process_index}.pt",
)
