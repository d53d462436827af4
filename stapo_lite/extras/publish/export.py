"""Export a run's adapter, as it is or merged into its base, with a model card.

The adapter is merged into the base in full precision, even if it was trained on 4-bit weights. The
export is read back, and gets its final name only if it reproduces the log-probabilities of base +
adapter. An interrupted export leaves `.DIR.partial`, which the next export replaces.
"""

import gc
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from stapo_lite.data.messages import stop_token_ids
from stapo_lite.errors import InputError, explained
from stapo_lite.extras.publish.card import FinishedRun, model_card, read_run
from stapo_lite.extras.publish.hub import prepare_repository, push_folder
from stapo_lite.files import open_to_others
from stapo_lite.model.adapter import public_name, read_fitting_adapter
from stapo_lite.model.loading import load_model_config, load_weights
from stapo_lite.model.tokenizer import load_tokenizer

SHARD_SIZE = "5GB"
HELD_OUT = (
    "What is 17 times 23? Let us think step by step: 17 times 20 is 340, and 17 times 3 is 51, so",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "The train left the station at noon, and when it arrived in the capital three hours later",
    "Solve for x: \\frac{x}{3} + 7 = 12. Subtracting 7 from both sides gives",
)
"""Texts whose log-probabilities the export must reproduce; from no training set."""
LARGEST_MEAN = {"float32": 3e-5, "bfloat16": 0.1, "float16": 0.1}
"""Limits of the mean deviation of an export, in nats. Half precision rounds weights and
activations. (A single token may deviate more: in float32 by 2e-4 in a random Qwen3.5, whose states
carry rounding on.)"""
LARGEST_SHARE = 0.5
LARGEST_COSINE = 0.7
"""Limits of a deviation in the direction of the adapter's effect: the share of the effect, and the
cosine. If the export lost the adapter, both are 1. Rounding may be larger than the effect of a few
steps, but its cosine is near 0."""


def export(
    run_folder: str | Path,
    out: str | Path,
    *,
    merge: bool = False,
    dtype: str = "bfloat16",
    base_model: str | None = None,
    evaluation: str | Path | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
) -> Path:
    """Write the adapter of a run, or the merged model; return the folder. It is also pushed to the
    Hub if a repository is named.

    Args:
        merge: merge the adapter into the base.
        dtype: data type of the export: float32, bfloat16 or float16.
        base_model: folder or Hub name of the base, by default the run's `model`; needed if that is
            quantised.
        evaluation: folder of an evaluation, for the card; by default the run's own results.
        push_to_hub: repository on the Hub; created if there is none.
        private: whether the repository is private.

    Raises:
        InputError: the folder holds no adapter, or one that does not fit the base; the base is
            missing or quantised; `out` exists or cannot be written; the Hub's token cannot write;
            the exported model gives other log-probabilities.
    """
    # Check all that is quick before weights are loaded.
    run = read_run(Path(run_folder), evaluation)
    final = Path(out).resolve()
    partial = final.with_name(f".{final.name}.partial")
    base = base_model or run.config.model
    if getattr(load_model_config(base), "quantization_config", None) is not None:
        fix = "name the base in full precision with --base-model"
        raise InputError(f"model={base} is quantised: {fix}")
    read_fitting_adapter(run.adapter, base)
    tokenizer, model_eos = load_tokenizer(base)
    stops = stop_token_ids(tokenizer, model_eos, run.config.data.apply_chat_template)
    if final.exists():
        raise InputError(f"--out={final} exists: delete it, or choose another folder")
    repository = None
    if push_to_hub:
        repository = prepare_repository(push_to_hub, private)
    with explained(f"--out={final}: cannot be written", OSError, SafetensorError):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(run, base, partial, merge, dtype, tokenizer, stops)
        open_to_others(partial)
        card = model_card(repository or final.name, run, base, merge, stops)
        (partial / "README.md").write_text(card, encoding="utf-8")
        partial.rename(final)
    if repository:
        print(f"pushed: {push_folder(final, repository)}")
    return final


def write(
    run: FinishedRun,
    base: str,
    folder: Path,
    merge: bool,
    dtype: str,
    tokenizer: Any,
    stops: tuple[int, ...],
) -> None:
    """Write the adapter in PEFT's format, or base + adapter as one model, with its tokenizer.

    Args:
        stops: tokens that ended a completion in training.

    Raises:
        InputError: the written files give log-probabilities that differ from base + adapter's.
    """
    # 1. Measure the model that was trained, with and without its adapter.
    model = load_adapted(base, run.adapter, dtype, whole=merge)
    expected = log_probabilities(model, tokenizer)
    with model.disable_adapter():
        effect = expected - log_probabilities(model, tokenizer)
    # 2. Write it.
    torch_dtype = getattr(torch, dtype)
    if merge:
        model = model.merge_and_unload().to(torch_dtype)
        save_merged(model, folder, stops, run.config.rollout.temperature)
    else:
        model.peft_config["default"].base_model_name_or_path = public_name(base)
        model.to(torch_dtype).save_pretrained(folder, save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    del model
    gc.collect()  # one model in memory at a time
    # 3. Read it back and compare.
    written = load_weights(str(folder), dtype) if merge else load_adapted(base, folder, dtype)
    difference = log_probabilities(written, AutoTokenizer.from_pretrained(folder)) - expected
    mean = difference.abs().mean().item()
    largest = difference.abs().max().item()
    along = (difference @ effect).abs()
    lost = (along > LARGEST_SHARE * effect.norm() ** 2) and (
        along > LARGEST_COSINE * effect.norm() * difference.norm()
    )
    report = (
        f"log-probabilities in {dtype}: {mean:.1e} from base + adapter on average, at most "
        f"{largest:.1e}; the adapter moves them by {effect.abs().mean().item():.1e}"
    )
    if lost or not mean <= LARGEST_MEAN[dtype]:  # also if the difference is not a number
        what = f"{folder} is not the model that was trained and was not exported"
        raise InputError(f"{what}. {report}")
    print(report)


def save_merged(merged: Any, folder: Path, stops: tuple[int, ...], temperature: float) -> None:
    """Write a merged model, with training's sampling settings as its default."""
    text = merged.config.get_text_config()
    merged.generation_config = GenerationConfig(  # the base's own may limit the length
        eos_token_id=list(stops),
        pad_token_id=text.pad_token_id,
        bos_token_id=text.bos_token_id,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
    )
    merged.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def load_adapted(base: str, adapter: Path, dtype: str, whole: bool = False) -> Any:
    """Load base + adapter on the CPU. The base is in float32 unless it is stored in `dtype`, so
    that their sum is rounded only once. `whole` as in `load_weights`."""
    config = load_model_config(base)
    stored = config.dtype or config.get_text_config().dtype
    if stored != getattr(torch, dtype):
        dtype = "float32"
    return PeftModel.from_pretrained(load_weights(base, dtype, whole=whole), str(adapter))


@torch.no_grad()
def log_probabilities(model: Any, tokenizer: Any) -> Tensor:
    """Log-probabilities of the held-out texts' tokens, without each first one; [n] fp32."""
    model.eval()
    logprobs = []
    for text in HELD_OUT:
        ids = tokenizer(text, return_tensors="pt").input_ids
        logits = model(input_ids=ids).logits[0, :-1].float()
        of_next = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
        logprobs.append(of_next[:, 0])
    return torch.cat(logprobs)
