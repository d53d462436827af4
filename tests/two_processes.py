"""Run by test_parallel.py in two processes, which split one mini-batch of each case two ways."""

import os
import sys
from pathlib import Path

# Before torch: two processes with two threads each fight for two cores.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from accelerate import Accelerator, PartialState

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from helpers import adapted_policy, double, later_update, objective, run_update
from objectives import INVARIANT

model, out = Path(sys.argv[1]), Path(sys.argv[2])
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
results = {"world_size": accelerator.num_processes}
for case in sys.argv[3:]:
    for split in ("alternating", "one has nothing to train"):
        policy = double(adapted_policy(model))
        completions, old = later_update(policy)
        mine = completions[rank::2]
        if split == "one has nothing to train":
            mine = [c for c in completions if (c.advantage == 0) == (rank == 1)]
        kind = objective(**INVARIANT[case])
        gradient, metrics, result = run_update(policy, mine, kind, old=old, max_tokens=40)
        results[case, split] = gradient, metrics, result.grad_norm
torch.save(results, out / f"{rank}.pt")
PartialState().destroy_process_group()  # its threads, still running at exit, may abort a process
