"""Run by test_parallel.py in two processes: updates of one mini-batch by the cases of the command line, split between
them in two ways, with the base whole and spread over both."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two processes with two threads each fight for two cores

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from helpers import INVARIANT, adapted_policy, later_update, objective, run_update

from stapo_lite.algorithm.microbatches import TokenBudget
from stapo_lite.model.sharding import make_sharding

model, out = Path(sys.argv[1]), Path(sys.argv[2])
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
shard = make_sharding(accelerator.device)


def longest(count):
    return max(gather_object([count]))


results = {"world_size": accelerator.num_processes}
for case in sys.argv[3:]:
    for split in ("alternating", "one has nothing to train"):
        del os.environ["ACCELERATE_USE_FSDP"]
        policy = adapted_policy(model)  # with its weights on both processes
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        policy.model.double()
        completions, old = later_update(policy)
        mine = completions[rank::2]
        if split == "one has nothing to train":
            mine = [c for c in completions if (c.advantage == 0) == (rank == 1)]
        spread = adapted_policy(model, shard=lambda base: shard(base.double()), train__gradient_checkpointing=True)
        spread.model.double()
        for name, parameter in spread.parameters.items():
            parameter.data.copy_(policy.parameters[name])
        for name, base in {"whole": policy, "spread": spread}.items():
            budget = TokenBudget(40, in_step=longest if base.sharded else None)
            gradient, metrics, result = run_update(base, mine, objective(**INVARIANT[case]), old=old, max_tokens=budget)
            results[case, split, name] = gradient, metrics, tuple(result)
torch.save(results, out / f"{rank}.pt")
