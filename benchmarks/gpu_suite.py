"""Every GPU test and benchmark with one command, on one CUDA card, without network; one JSON.

    python benchmarks/gpu_suite.py --out benchmarks/results/gpu.json [--only tests lm_head ...] [--gpu-memory 24]

Parts: `tests` (tests/gpu); `lm_head`, `update`, `sync`, `mismatch` (the benchmarks of those names, on Qwen3-1.7B); and
for each shipped Qwen3 config `run:NAME`: three steps of training on a model of that size with random weights, as on a
card of `--gpu-memory` GiB: another process holds the rest of the card, and vLLM gets its share of what is left. Each
`run` reports the most memory that the card gave out in each phase, next to what `stapo plan` predicts, tokens per
second, and the seconds of sleep and wake. Each part has a process of its own, and the file is written after each, so
that parts can be run one by one.
Needs disk for the largest model (30 GB for 14B).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from common import now, save
from random_model import build, qwen3

from stapo_lite.planning.plan import CUDA_CONTEXT

HERE = Path(__file__).parent
RUNS = {"qwen1.7b_lora": "1.7B", "qwen8b_lora": "8B", "qwen8b_qlora": "8B", "qwen14b_qlora": "14B"}
# Random weights write to the limit: short completions, and the longest micro-batches are made of many of them.
SHORT = [
    "rollout.max_completion_length=1024", "data.prompt_suffix=''", "data.subset=null", "data.answer_column=answer",
    "reward.functions=[gpu_suite:parity]", "train.max_steps=3", "train.batch_size=8", "train.mini_batch_size=4",
    "log.save_steps=0", "data.drop_contaminated=false",
]  # fmt: skip


def parity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that random completions get half of the time."""
    return [float(sum(ids) % 2) for ids in completion_ids]


class Watch(threading.Thread):
    """The most memory in use on the card, by phase.

    Attributes:
        phase: where the following samples are counted; `None` nowhere.
        base: bytes that do not count.
        peaks: bytes.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.phase: str | None = None
        self.base = 0
        self.peaks: dict[str, int] = {}

    def run(self) -> None:
        while True:
            if self.phase is not None:
                free, total = torch.cuda.mem_get_info()
                self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), total - free - self.base)
            time.sleep(0.02)


@contextmanager
def ballast(leave: int) -> Iterator[None]:
    """Have another process hold the card's memory but for `leave` bytes. torch's own limit would count what a sleeping
    vLLM has given back."""
    code = "import sys, torch; x = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda'); print(flush=True)"
    size = torch.cuda.mem_get_info()[0] - leave - CUDA_CONTEXT
    command = [sys.executable, "-c", f"{code}; sys.stdin.read()", str(max(1, size))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"error: no ballast of {size / 2**30:.1f} GiB could be held")
        try:
            yield
        finally:
            process.kill()


def run_config(name: str, gpu_memory: int, scratch: Path) -> dict[str, Any]:
    """Three steps of a shipped config; see above."""
    from stapo_lite.config import load_config
    from stapo_lite.planning.choice import apply, choose
    from stapo_lite.planning.plan import GIB, Cards, make_plan
    from stapo_lite.rollout.vllm_engine import VLLMEngine
    from stapo_lite.training.loop import train

    model = qwen3(RUNS[name])
    build(scratch / "model", model, torch.bfloat16, "cuda")
    torch.cuda.empty_cache()
    prompts = [json.dumps({"prompt": f"Say something about the number {n}.", "answer": "1"}) for n in range(64)]
    (scratch / "prompts.jsonl").write_text("\n".join(prompts), encoding="utf-8")
    used_by_others = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    total = torch.cuda.mem_get_info()[1]
    paths = [f"model={scratch / 'model'}", f"data.source={scratch / 'prompts.jsonl'}", f"output_dir={scratch / 'run'}"]
    given = load_config(HERE.parent / f"configs/{name}.yaml", [*SHORT, *paths])
    planned = apply(given, choose(given, model, Cards(gpu_memory)))
    share = planned.rollout.gpu_memory_utilization * gpu_memory / total
    config = load_config(planned.model_dump(), [f"rollout.gpu_memory_utilization={share:.4f}"])

    watch, seconds = Watch(), {"sleep": [], "wake": []}
    watch.start()

    def timed(phase: str, original: Any, engine: Any) -> None:
        """Sleep begins the update, wake the rollouts."""
        start = now()
        original(engine)
        seconds["sleep" if phase == "update" else "wake"].append(now() - start)
        watch.phase = phase

    sleep, wake = VLLMEngine.sleep, VLLMEngine.wake
    VLLMEngine.sleep = lambda engine: timed("update", sleep, engine)  # type: ignore[method-assign]
    VLLMEngine.wake = lambda engine: timed("rollout", wake, engine)  # type: ignore[method-assign]
    with ballast(gpu_memory - used_by_others) if gpu_memory < total else nullcontext():
        free, total = torch.cuda.mem_get_info()
        watch.base = total - free - used_by_others  # the ballast is no part of the run
        metrics = list(train(config))
        watch.phase = None
    prediction = make_plan(planned, model, Cards(gpu_memory))
    tokens = planned.train.batch_size * planned.rollout.num_generations * planned.rollout.max_completion_length
    return {
        "GiB in use, others' included": {phase: peak / GIB for phase, peak in watch.peaks.items()},
        "GiB in use by others before": used_by_others / GIB,
        "GiB predicted": {
            "rollout": sum(prediction.rollout.values()) / GIB,
            "update": sum(prediction.update.values()) / GIB,
        },
        "predicted, part by part": {k: v / GIB for k, v in (prediction.rollout | prediction.update).items()},
        "torch's peak in GiB": torch.cuda.max_memory_allocated() / GIB,
        "seconds": seconds,
        "rollout tokens per second": tokens / metrics[-1]["seconds_rollout"],
        "update tokens per second": tokens / metrics[-1]["seconds_update"],
        "steps": [m | {"peak_memory_gb": m["peak_memory_gb"] - watch.base / GIB} for m in metrics],
    }


def run_tests() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", str(HERE.parent / "tests/gpu")],
        capture_output=True, text=True, check=False, cwd=HERE.parent,
    )  # fmt: skip
    return {"exit status": done.returncode, "output": (done.stdout + done.stderr)[-8000:]}


def run_script(name: str, *arguments: str) -> dict[str, Any]:
    """Another benchmark's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments, "--out", str(out)], check=True)
        return json.loads(out.read_text(encoding="utf-8"))


def run_part(part: str, gpu_memory: int, scratch: Path) -> dict[str, Any]:
    if part == "tests":
        return run_tests()
    if part == "lm_head":
        return run_script("lm_head", "--tokens", "8192")
    if part.startswith("run:"):
        return run_config(part.removeprefix("run:"), gpu_memory, scratch)
    model = build(scratch / "model", qwen3("1.7B"), torch.bfloat16, "cuda")
    shape = ["--prompts", "16", "--prompt-length", "256", "--longest", "4096", "--max-tokens", "16384"]
    return run_script(part, "--model", str(model), *(shape if part == "update" else []))


def main() -> None:
    parts = ["tests", "lm_head", "update", "sync", "mismatch", *(f"run:{name}" for name in RUNS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--gpu-memory", type=float, default=24, metavar="GIB")
    parser.add_argument("--scratch", type=Path, help="folder for models; a temporary one by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    gpu_memory = int(arguments.gpu_memory * 2**30)
    if arguments.child:
        if not torch.cuda.is_available():
            raise SystemExit("error: needs a CUDA device")
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            result = run_part(arguments.only[0], gpu_memory, Path(folder))
        save(result | {"device": torch.cuda.get_device_name(), "GiB allowed": arguments.gpu_memory}, arguments.out)
        return
    results = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    for part in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "part.json"
            own = ["--child", "--only", part, "--gpu-memory", str(arguments.gpu_memory), "--out", str(out)]
            scratch = ["--scratch", str(arguments.scratch)] if arguments.scratch else []
            done = subprocess.run([sys.executable, __file__, *own, *scratch], check=False)
            failed = {"failed with status": done.returncode}
            results[part] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else failed
        save(results, arguments.out)


if __name__ == "__main__":
    main()
