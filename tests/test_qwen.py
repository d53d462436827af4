"""A real Qwen through a config that we ship, from the first step to the exported model."""

import pytest
from helpers import ROOT, accelerate_launch, command, shared_data

from stapo_lite.files import read_lines, read_object
from stapo_lite.training.folder import read_metrics

SIZES = [
    "data.subset=null",
    "data.prompt_column=problem",
    "data.answer_column=answer",
    "data.max_prompt_length=256",
    "rollout.num_generations=4",
    "rollout.max_completion_length=24",
    "rollout.vllm={kv_cache_memory_bytes: 268435456}",
    "train.batch_size=2",
    "train.mini_batch_size=2",
    "train.max_tokens_per_microbatch=2048",
    "log.save_steps=1",
]


@pytest.mark.slow
def test_a_real_qwen_is_trained_resumed_exported_and_evaluated(qwen, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    run, problems = tmp_path / "run", tmp_path / "problems.jsonl"
    lines = shared_data("gsm8k_test").read_text("utf-8").splitlines()[:2]
    problems.write_text("\n".join(lines) + "\n", encoding="utf-8")
    train = ["-m", "stapo_lite.train", "configs/qwen8b_lora.yaml", *SIZES, f"model={qwen}"]
    train += [f"data.source={shared_data('gsm8k_train')}", f"output_dir={run}"]
    accelerate_launch(1, *train, "train.max_steps=1", cwd=ROOT)
    accelerate_launch(1, *train, "train.max_steps=2", "--resume", cwd=ROOT)
    assert [metrics["step"] for metrics in read_metrics(run)] == [1, 2]
    gap = read_object(run / "environment.json")["self_check"]
    assert float(gap.split()[0]) < 0.1  # bfloat16, if the CPU has units for it
    assert command("export", run, "--merge", "--out", tmp_path / "model") == 0
    short = ["rollout.max_completion_length=24", "rollout.num_samples=2"]
    models = {
        "adapter": [f"model={qwen}", f"adapter={run / 'adapter'}"],
        "merged": [f"model={tmp_path / 'model'}"],
    }
    for name, keys in models.items():
        keys += [*short, f"benchmarks=[{problems}]", f"output_dir={tmp_path / name}"]
        assert command("evaluate", "configs/eval.yaml", *keys) == 0
        assert len(read_lines(tmp_path / name / "verdicts.jsonl")) == 4
