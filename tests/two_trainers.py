"""Run by test_parallel.py in two processes, each with vLLM: two runs, exports, an evaluation."""

import os
import sys
from pathlib import Path

# Before torch: two processes with two threads each fight for two cores.
os.environ["OMP_NUM_THREADS"] = "1"

from accelerate import PartialState

from stapo_lite import Callback, Trainer


def letters(completions, **_):
    return [len(set(completion)) for completion in completions]


class OneStep(Callback):
    """Ends a run after its first step, as the main process alone decides."""

    def on_step_end(self, run, metrics, rollouts):
        if run.accelerator.is_main_process:
            run.stop_reason = "enough"


model, questions, out = map(Path, sys.argv[1:])
rows = [{"prompt": f"say {word}"} for word in ("five", "six", "seven", "nine")]
keys = {"dtype": "float32", "max_prompt_length": 300, "max_completion_length": 8}
keys |= {"engine": "vllm", "num_generations": 4, "vllm": {"kv_cache_memory_bytes": 10 << 20}}
keys |= {"max_steps": 2, "batch_size": 4, "mini_batch_size": 4, "max_tokens_per_microbatch": 1024}
for name in ("one", "another"):
    own = {"output_dir": out / name, "train_dataset": rows, "callbacks": [OneStep()]}
    trainer = Trainer(model, letters, **own, **keys)
    assert len(trainer.train()) == 1
    exported = trainer.export(out / f"{name}-export")
    assert (exported / "adapter_model.safetensors").exists()
short = {"max_prompt_length": 64}  # the toy has 512 positions
results = trainer.evaluate(benchmarks=[str(questions)], rollout={"num_samples": 2}, data=short)
assert (results is not None) == (os.environ["RANK"] == "0")
PartialState().destroy_process_group()  # its threads, still running at exit, may abort a process
