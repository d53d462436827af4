"""Steps of decoding against tokens that are computed twice: sequences at a time for a KV cache, and what it keeps free.

    python benchmarks/preemption.py [--cache 9216] [--sequences 24 32 48 96] [--watermarks 0 0.02 0.05 0.1] [--out FILE]

A cache that is full makes vLLM drop the youngest sequence and compute its tokens once more later. On a card a step of
decoding costs a reading of the weights, however many sequences it serves, and a token that is computed again only its
arithmetic, in a large product. Counted with vLLM's scheduler and a tiny model, the same on every machine: prompts of 64
tokens, groups of eight, completions of log-normal lengths, a third of the longest on average.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import save
from random_model import build, qwen3

from stapo_lite.rollout.vllm_options import prepare_vllm

PROMPT, LONGEST, BLOCK = 64, 1024, 32
GROUP = 8


def draw(count: int) -> list[tuple[list[int], int]]:
    """Prompts, and the lengths of their completions."""
    lengths = random.Random(0)
    prompts = [[random.Random(f"{i} {j}").randrange(200) for j in range(PROMPT)] for i in range(count // GROUP)]
    return [(prompts[i // GROUP], int(min(LONGEST, 8 + lengths.lognormvariate(5.6, 0.7)))) for i in range(count)]


def count(model: Path, cache: int, sequences: int, watermark: float, completions: int) -> dict[str, Any]:
    """One engine samples all; what its scheduler did."""
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        str(model), dtype="bfloat16", enforce_eager=True, enable_chunked_prefill=False, max_num_batched_tokens=4096,
        block_size=BLOCK, num_gpu_blocks_override=cache // BLOCK, kv_cache_memory_bytes=2**28, max_num_seqs=sequences,
        max_model_len=PROMPT + LONGEST, watermark=watermark, disable_log_stats=True, use_tqdm_on_load=False,
    )  # fmt: skip
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    schedule, counted = scheduler.schedule, {"steps": 0, "tokens": 0, "preempted": 0}

    def counting(*arguments: Any, **options: Any) -> Any:
        output = schedule(*arguments, **options)
        counted["steps"] += 1
        counted["tokens"] += output.total_num_scheduled_tokens
        counted["preempted"] += len(output.preempted_req_ids or ())
        return output

    scheduler.schedule = counting
    drawn = draw(completions)
    for number, (prompt, length) in enumerate(drawn):
        parameters = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
    while engine.has_unfinished_requests():
        engine.step()
    engine.engine_core.shutdown()
    tokens = counted.pop("tokens") / sum(PROMPT + length for _, length in drawn)
    return counted | {"tokens computed for each one needed": round(tokens, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=int, default=9216, help="tokens")
    parser.add_argument("--sequences", type=int, nargs="+", default=[24, 32, 48, 96])
    parser.add_argument("--watermarks", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1])
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    prepare_vllm()
    torch._dynamo.config.disable = True  # a minute of compiling, for a tiny model
    mean = sum(PROMPT + length for _, length in draw(given.completions)) / given.completions
    result: dict[str, Any] = {"cache, in sequences of the mean length": round(given.cache / mean, 1)}
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny = qwen3("0.6B", vocab_size=260, num_key_value_heads=1, head_dim=32, **shape)
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder), tiny)
        for sequences in given.sequences:
            for watermark in given.watermarks:
                counted = count(model, given.cache, sequences, watermark, given.completions)
                result[f"{sequences} sequences, watermark {watermark:g}"] = counted
    save(result, given.out)


if __name__ == "__main__":
    main()
