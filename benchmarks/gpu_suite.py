"""Run every GPU test and benchmark with one command on one CUDA card, without a network.

    python benchmarks/gpu_suite.py --out benchmarks/results/gpu.json [--only tests lm_head ...]
    [--gpu-memory 24] [--set rollout.share_base=false]

Parts, the most telling first: `tests` (tests/gpu); `decoding` (tokens per second of Qwen3-8B in
bf16, nf4 and fp8, with and without an adapter, and what vLLM leaves of the card); `lm_head`,
`update`, `mismatch` (the benchmarks of those names, the last two on the shape of Qwen3-1.7B); and
`run:NAME` for each shipped Qwen3 config: three steps of training on a model of that size with
random weights, as on a card of `--gpu-memory` GiB: another process holds the rest. Each `run`
reports the peak memory of the card in each phase, what `stapo plan` says of it, what the run itself
printed about memory, tokens per second, and the seconds of sleep and wake.

Each part has a process of its own, and the JSON file is written after each part, so parts can be
run one by one. The largest model (14B) needs 30 GB of disk.
"""

import argparse
import io
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import now, save
from random_model import build, qwen3

from stapo_lite.files import write_lines

HERE = Path(__file__).parent
GIB = 2**30
CUDA_CONTEXT = GIB // 2
"""Of the process that holds a part of the card."""
RUNS = {"qwen1.7b_lora": "1.7B", "qwen8b_lora": "8B", "qwen8b_qlora": "8B", "qwen14b_qlora": "14B"}
DECODED = {"bf16": None, "nf4": "bitsandbytes", "fp8": "fp8"}
# A model with random weights writes until the limit. Limits are short here, so that the longest
# micro-batches hold many completions.
SHORT = [
    "rollout.max_completion_length=1024",
    "data.prompt_suffix=''",
    "data.subset=null",
    "data.answer_column=answer",
    "reward.functions=[gpu_suite:parity]",
    "train.max_steps=3",
    "train.batch_size=8",
    "train.mini_batch_size=4",
    "log.save_steps=0",
]


def parity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward of 1 for about half of all random completions."""
    return [float(sum(ids) % 2) for ids in completion_ids]


class Watch(threading.Thread):
    """Samples the memory in use on the card, and keeps the peak of each phase.

    Attributes:
        phase: the phase that samples count for; while it is None, none are taken.
        base: bytes in use that do not count.
        peaks: phase -> bytes.
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
                used = total - free - self.base
                self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), used)
            time.sleep(0.02)


@contextmanager
def ballast(leave: int) -> Iterator[None]:
    """Let another process hold all of the card's memory except for `leave` bytes.

    Torch's own limit would count the memory that a sleeping vLLM has given back.
    """
    code = (
        "import sys, torch; x = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda'); "
        "print(flush=True)"
    )
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


def time_sleep_and_wake(watch: Watch) -> dict[str, list[float]]:
    """Have vLLM engines set the watch's phase; return lists that their seconds of sleep and wake
    will be added to."""
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    seconds: dict[str, list[float]] = {"sleep": [], "wake": []}

    def timed(phase: str, original: Any, engine: Any) -> None:
        """Time a sleep, which begins the update, or a wake, which begins the rollouts."""
        start = now()
        original(engine)
        seconds["sleep" if phase == "update" else "wake"].append(now() - start)
        watch.phase = phase

    sleep, wake = VLLMEngine.sleep, VLLMEngine.wake
    VLLMEngine.sleep = lambda engine: timed("update", sleep, engine)  # type: ignore[method-assign]
    VLLMEngine.wake = lambda engine: timed("rollout", wake, engine)  # type: ignore[method-assign]
    return seconds


@contextmanager
def kept_output() -> Iterator[io.StringIO]:
    """Keep what is printed and warned about memory within the context, and print it at its end."""
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logging.getLogger("stapo_lite.training.memory").addHandler(handler)
    try:
        with redirect_stdout(printed):
            yield printed
    finally:
        print(printed.getvalue())


def run_config(
    name: str, gpu_memory: int, scratch: Path, overrides: Sequence[str]
) -> dict[str, Any]:
    """Train three steps with a shipped config; measure memory and speed."""
    from stapo_lite import Trainer
    from stapo_lite.config import load_config
    from stapo_lite.extras.planning import plan

    build(scratch / "model", qwen3(RUNS[name]), torch.bfloat16, "cuda")
    torch.cuda.empty_cache()
    requests = [f"Say something about the number {n}." for n in range(64)]
    rows = [{"prompt": request, "answer": "1"} for request in requests]
    write_lines(scratch / "prompts.jsonl", rows)
    free, total = torch.cuda.mem_get_info()
    used_by_others = total - free
    paths = [
        f"model={scratch / 'model'}",
        f"data.source={scratch / 'prompts.jsonl'}",
        f"output_dir={scratch / 'run'}",
    ]
    config = load_config(HERE.parent / f"configs/{name}.yaml", [*SHORT, *paths, *overrides])
    watch = Watch()
    watch.start()
    seconds = time_sleep_and_wake(watch)
    with ballast(gpu_memory - used_by_others) if gpu_memory < total else nullcontext():
        free, total = torch.cuda.mem_get_info()
        watch.base = total - free - used_by_others  # the ballast is no part of the run
        with kept_output() as printed:
            metrics = Trainer(config=config).train()
        watch.phase = None
    completions = config.train.batch_size * config.rollout.num_generations
    tokens = completions * config.rollout.max_completion_length
    return {
        "GiB in use, others' included": {phase: peak / GIB for phase, peak in watch.peaks.items()},
        "GiB in use by others before": used_by_others / GIB,
        "stapo plan": plan(config, gpu_memory / GIB).splitlines(),
        "printed": [line for line in printed.getvalue().splitlines() if "micro-batches" in line],
        "torch's peak in GiB": torch.cuda.max_memory_allocated() / GIB,
        "seconds": seconds,
        "rollout tokens per second": tokens / metrics[-1]["seconds_rollout"],
        "update tokens per second": tokens / metrics[-1]["seconds_update"],
        "steps": [m | {"peak_memory_gb": m["peak_memory_gb"] - watch.base / GIB} for m in metrics],
    }


def run_decoding(scratch: Path) -> dict[str, Any]:
    """Decode with vLLM alone; each engine in a process of its own, which gets the whole card."""
    build(scratch / "model", qwen3("8B"), torch.bfloat16, "cuda")
    torch.cuda.empty_cache()
    found = {}
    for name, quantization in DECODED.items():
        for rank in (0, 32):
            code = (
                "import json, sys; sys.path.insert(0, sys.argv[1]); import gpu_suite; "
                "print(json.dumps(gpu_suite.decode(sys.argv[2], sys.argv[3] or None, "
                "int(sys.argv[4]))))"
            )
            given = [str(HERE), str(scratch / "model"), quantization or "", str(rank)]
            done = subprocess.run(
                [sys.executable, "-c", code, *given], capture_output=True, text=True, check=False
            )
            result: Any = {"failed": done.stderr[-2000:]}
            if done.returncode == 0:
                result = json.loads(done.stdout.splitlines()[-1])
            found[f"{name}, {'an adapter' if rank else 'no adapter'}"] = result
    return found


def decode(model: str, quantization: str | None, rank: int, length: int = 1024) -> dict[str, Any]:
    """Output tokens per second for several numbers of sequences at a time.

    Args:
        rank: of an adapter of zeros that is served; 0 for none.
        length: of each completion, in tokens.
    """
    from stapo_lite.config import Engine, Lora
    from stapo_lite.rollout.engine import RolloutSettings
    from stapo_lite.rollout.vllm_engine import VLLMEngine
    from stapo_lite.types import Prompt

    settings = RolloutSettings(8, length + 64, length, 1.0, stop_token_ids=())
    options = Engine(max_num_seqs=128, gpu_memory_utilization=0.85, quantization=quantization)
    lora = Lora(r=rank) if rank else None
    engine = VLLMEngine(model, "auto", settings, options, lora)
    if lora is not None:
        engine.publish(zeros(model, lora), 1)
    prompts = [Prompt("", [10 + (7 * i + t) % 250 for t in range(64)], None) for i in range(16)]
    speeds = {}
    for groups in (1, 2, 4, 8, 16):
        start = now()
        done = engine.generate(prompts[:groups], range(groups))
        tokens = sum(len(completion.token_ids) for group in done for completion in group)
        speeds[8 * groups] = tokens / (now() - start)
    left = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else None
    engine.close()
    return {"tokens per second": speeds, "GiB left of the card": left}


def zeros(model: str, lora: Any) -> Any:
    """An adapter that changes nothing, as an engine takes it."""
    from stapo_lite.model.adapter import add_adapter
    from stapo_lite.model.loading import load_model_config, without_weights

    adapted = add_adapter(without_weights(load_model_config(model)), lora)
    values = {
        name.replace(".default.", "."): torch.zeros(parameter.shape)
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    return SimpleNamespace(model=adapted, adapter_tensors=lambda dtype: values)


def run_tests() -> dict[str, Any]:
    """Run tests/gpu."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(HERE.parent / "tests/gpu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parent)
    return {"exit status": done.returncode, "output": (done.stdout + done.stderr)[-8000:]}


def run_script(name: str, *arguments: str) -> dict[str, Any]:
    """Run another benchmark; return its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run(
            [sys.executable, str(HERE / f"{name}.py"), *arguments, "--out", str(out)], check=True
        )
        return json.loads(out.read_text(encoding="utf-8"))


def run_part(part: str, gpu_memory: int, scratch: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run one part in this process; return its result."""
    if part == "tests":
        return run_tests()
    if part == "decoding":
        return run_decoding(scratch)
    if part == "lm_head":
        return run_script("lm_head", "--tokens", "8192")
    if part.startswith("run:"):
        return run_config(part.removeprefix("run:"), gpu_memory, scratch, overrides)
    model = build(scratch / "model", qwen3("1.7B"), torch.bfloat16, "cuda")
    options = ["--model", str(model)]
    if part == "update":
        options += ["--prompts", "16", "--prompt-length", "256"]
        options += ["--longest", "4096", "--max-tokens", "16384"]
    return run_script(part, *options)


def main() -> None:
    parts = [
        "tests",
        "decoding",
        "lm_head",
        "update",
        "mismatch",
        *(f"run:{name}" for name in RUNS),
    ]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--gpu-memory", type=float, default=24, metavar="GIB")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of each run")
    parser.add_argument(
        "--scratch", type=Path, help="folder for models; a temporary one by default"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    gpu_memory = int(arguments.gpu_memory * 2**30)
    if arguments.child:
        if not torch.cuda.is_available():
            raise SystemExit("error: needs a CUDA device")
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            result = run_part(arguments.only[0], gpu_memory, Path(folder), arguments.set)
        card = {"device": torch.cuda.get_device_name(), "GiB allowed": arguments.gpu_memory}
        save(result | card, arguments.out)
        return
    results = {}
    if arguments.out.exists():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))
    for part in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "part.json"
            own = ["--child", "--only", part, "--out", str(out)]
            own += ["--gpu-memory", str(arguments.gpu_memory), "--set", *arguments.set]
            if arguments.scratch:
                own += ["--scratch", str(arguments.scratch)]
            done = subprocess.run([sys.executable, __file__, *own], check=False)
            if out.exists():
                results[part] = json.loads(out.read_text(encoding="utf-8"))
            else:
                results[part] = {"failed with status": done.returncode}
        save(results, arguments.out)


if __name__ == "__main__":
    main()
