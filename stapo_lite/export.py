"""A run's adapter as something to publish: as it is, or merged into its base, with a model card.

    python -m stapo_lite.export runs/x --out DIR [--merge] [--dtype bfloat16] [--push-to-hub user/name --private]

The adapter is merged into the base in full precision, also where training ran on 4-bit weights. What is written is
loaded again and must give the log-probabilities of base + adapter before the folder gets its name; an interrupted
export leaves `.DIR.partial`, which the next one replaces.
"""

import argparse
import gc
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stapo_lite import __version__
from stapo_lite.checkpoint import latest_checkpoint, list_checkpoints
from stapo_lite.config import Config, InputError, exit_on_input_error, load_config, one_line, to_yaml
from stapo_lite.data import stop_token_ids
from stapo_lite.files import read_lines, write_text
from stapo_lite.policy import load_model_config, load_tokenizer
from stapo_lite.rollout.vllm_engine import served_rank
from stapo_lite.scores import results_table
from stapo_lite.tracking import ENVIRONMENT_FILE, EVALUATIONS_FILE, run_metrics

DTYPES = ("float32", "bfloat16", "float16")
MANIFEST = "stapo_lite.json"
SHARD_SIZE = "5GB"
HELD_OUT = (
    "What is 17 times 23? Let us think step by step: 17 times 20 is 340, and 17 times 3 is 51, so",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "The train left the station at noon, and when it arrived in the capital three hours later",
    "Solve for x: \\frac{x}{3} + 7 = 12. Subtracting 7 from both sides gives",
)
"""Texts whose log-probabilities must come out the same; no training set holds them."""
LARGEST_IN_FLOAT32, MEAN_IN_HALF = 1e-4, 0.1
"""Deviations in nats above which nothing is exported: the largest, or in half precision, which rounds weights and
activations, the mean."""


class Deviation(NamedTuple):
    """Of the exported model's log-probabilities from those of base + adapter, in nats."""

    mean: float
    largest: float
    adapter: float
    """For comparison: how far the adapter itself moves them, on average."""


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
    show: Callable[[str], Any] = print,
) -> Path:
    """Write the adapter of a run, or the merged model, and push it to the Hub if asked; return the folder.

    Where `out` holds this very export already, only the card is written anew, and pushing goes on.

    Args:
        merge: merge the adapter into the base.
        dtype: of what is written, one of `DTYPES`.
        base_model: folder or Hub name of the base, by default the run's `model`; needed where that is quantised.
        evaluation: folder of an evaluation, for the card; by default the benchmarks of the run itself.
        push_to_hub: repository on the Hub; made if there is none.
        private: whether it is made private.

    Raises:
        InputError: the folder holds no adapter; the base is missing or quantised; `out` holds something else, or its
            disk has no room; the token cannot write; the exported model gives other log-probabilities.
    """
    folder, final = Path(run_folder), Path(out)
    config, metrics = load_config(folder / "config.yaml"), run_metrics(folder)
    adapter = find_adapter(folder)
    base = base_model or config.model
    if getattr(load_model_config(base), "quantization_config", None) is not None:
        raise InputError(f"model={base} is quantised: name the base in full precision with --base-model")
    if push_to_hub and not merge and Path(base).exists():
        raise InputError(
            f"--push-to-hub: the base {base} is a local folder, of no use to others: --merge, or --base-model"
        )
    if push_to_hub:
        prepare_repository(push_to_hub, private)
    digest = hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    manifest = {"adapter_sha256": digest, "base_model": base, "merged": merge, "dtype": dtype}
    if final.exists():
        if not same_export(final, manifest):
            raise InputError(f"--out={final} exists: delete it, or choose another folder")
        show(f"{final} holds this export already")
    else:
        check_disk(final, base, adapter, merge, dtype)
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        deviation = (
            write_merged(base, adapter, partial, config, dtype)
            if merge
            else write_adapter(base, adapter, partial, dtype)
        )
        report = (
            f"log-probabilities in {dtype}: {deviation.mean:.1e} from base + adapter on average, at most "
            f"{deviation.largest:.1e}; the adapter moves them by {deviation.adapter:.1e}"
        )
        if deviation.largest > LARGEST_IN_FLOAT32 if dtype == "float32" else deviation.mean > MEAN_IN_HALF:
            raise InputError(f"{partial} is not the model that was trained and was not exported. {report}")
        show(report)
        text = json.dumps(manifest | {"stapo_lite": __version__, "deviation": deviation._asdict()}, indent=1)
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        partial.rename(final)
    results = (
        read_results(Path(evaluation)) if evaluation else next(iter(read_lines(folder / EVALUATIONS_FILE)[::-1]), None)
    )
    environment = json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    write_text(
        final / "README.md", model_card(push_to_hub or final.name, config, base, metrics, environment, results, merge)
    )
    if push_to_hub:
        show(f"pushed: {push(final, push_to_hub)}")
    return final


def find_adapter(run_folder: Path) -> Path:
    """The run's final adapter, or that of its newest checkpoint.

    Raises:
        InputError: it has neither.
    """
    if (run_folder / "adapter" / "adapter_model.safetensors").exists():
        return run_folder / "adapter"
    if not list_checkpoints(run_folder):
        raise InputError(f"{run_folder}: no adapter and no checkpoint yet")
    return latest_checkpoint(run_folder)


def same_export(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether the folder is what an export with this manifest wrote."""
    try:
        before = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(before.get(key) == value for key, value in manifest.items())


def check_disk(final: Path, base: str, adapter: Path, merge: bool, dtype: str) -> None:
    """Raises InputError unless what will be written has room on its disk, or its folder cannot be made."""
    from transformers import AutoModelForCausalLM

    size = torch.finfo(getattr(torch, dtype)).bits // 8
    if merge:
        with torch.device("meta"):  # shapes only; tied weights count once
            model: Any = AutoModelForCausalLM.from_config(load_model_config(base))
        needed = size * sum(parameter.numel() for parameter in model.parameters())
    else:
        needed = (adapter / "adapter_model.safetensors").stat().st_size
    needed += 100 << 20  # tokenizer and the like
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out={final}: cannot be written ({error.strerror})") from None
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise InputError(f"--out={final} needs {needed / 2**30:.1f} GiB, but its disk has {free / 2**30:.1f} GiB left")


def write_merged(base: str, adapter: Path, folder: Path, config: Config, dtype: str) -> Deviation:
    """Write base + adapter as one model, with everything that serves it."""
    from peft import PeftModel

    tokenizer, model_eos = load_tokenizer(base, 1, [])
    # In the checkpoint's own precision: each weight is rounded once, when the adapter (fp32) is added to it.
    model = PeftModel.from_pretrained(load_base(base, "float32" if dtype == "float32" else "auto"), str(adapter))
    expected = reference(model, tokenizer)
    merged: Any = model.merge_and_unload()
    merged.to(getattr(torch, dtype))
    # The tokens that ended a completion in training, so that whoever serves the model stops there too.
    merged.generation_config.eos_token_id = list(stop_token_ids(tokenizer, model_eos, config.data.apply_chat_template))
    merged.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    del model, merged
    gc.collect()  # one model in memory at a time
    return deviation_from(expected, log_probabilities(load_base(str(folder), dtype), tokenizer))


def write_adapter(base: str, adapter: Path, folder: Path, dtype: str) -> Deviation:
    """Write the adapter in PEFT's format, with the tokenizer and its chat template."""
    from peft import PeftConfig, PeftModel
    from safetensors.torch import load_file, save_file

    tokenizer, _ = load_tokenizer(base, 1, [])
    peft_config = PeftConfig.from_pretrained(str(adapter))
    peft_config.base_model_name_or_path = base
    peft_config.save_pretrained(str(folder))
    tensors = {k: v.to(getattr(torch, dtype)) for k, v in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    model = PeftModel.from_pretrained(load_base(base, "float32" if dtype == "float32" else "auto"), str(adapter))
    expected = reference(model, tokenizer)
    plain: Any = model.unload()
    return deviation_from(expected, log_probabilities(PeftModel.from_pretrained(plain, str(folder)), tokenizer))


def load_base(model: str, dtype: str) -> Any:
    """A causal language model on the CPU.

    Raises:
        InputError: its weights cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    except Exception as error:  # transformers raises a dozen kinds
        raise InputError(f"model={model}: its weights cannot be loaded ({one_line(error)})") from None


@torch.no_grad()
def log_probabilities(model: Any, tokenizer: Any) -> Tensor:
    """Of each token of the held-out texts but the first, [n] fp32."""
    model.eval()
    found = []
    rows = [torch.tensor(ids) for ids in tokenizer(list(HELD_OUT)).input_ids]
    logits = model(
        input_ids=pad_sequence(rows, batch_first=True)
    ).logits.float()  # causal: padding behind changes nothing
    for ids, scores in zip(rows, logits, strict=True):
        found.append(scores[: len(ids) - 1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(found)


@torch.no_grad()
def reference(model: Any, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """`log_probabilities` of base + adapter, and of the base alone."""
    together = log_probabilities(model, tokenizer)
    with model.disable_adapter():
        return together, log_probabilities(model, tokenizer)


def deviation_from(references: tuple[Tensor, Tensor], actual: Tensor) -> Deviation:
    together, alone = references
    difference = (actual - together).abs()
    return Deviation(difference.mean().item(), difference.max().item(), (together - alone).abs().mean().item())


def read_results(folder: Path) -> dict[str, Any]:
    """The results of an evaluation.

    Raises:
        InputError: the folder holds none.
    """
    try:
        return json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no results of an evaluation ({one_line(error)})") from None


def model_card(
    name: str,
    config: Config,
    base: str,
    metrics: list[dict[str, Any]],
    environment: dict[str, Any],
    results: dict[str, Any] | None,
    merged: bool,
) -> str:
    """The README of the repository, with the Hub's metadata. A folder of this machine is named without its path.

    Args:
        name: repository or folder.
        results: of an evaluation, or a line of the run's `evaluations.jsonl`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data = config.data
    local_data = data.source == "arithmetic" or data.source.endswith((".jsonl", ".parquet"))
    metadata = ModelCardData(
        base_model=None if Path(base).exists() else base,
        datasets=None if local_data else [data.source],
        library_name="transformers" if merged else "peft",
        license=find_license(base),
        pipeline_tag="text-generation",
        tags=["stapo_lite", config.algorithm, "reinforcement-learning", "lora"],
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(files("stapo_lite") / "templates" / "model_card.md"),
        name=name,
        base=Path(base).name if Path(base).exists() else base,
        data=Path(data.source).name if local_data else " ".join(filter(None, [data.source, data.subset, data.split])),
        merged=merged,
        config=config,
        fields=to_yaml(config.objective).strip(),
        steps=metrics[-1]["step"],
        first=metrics[0],
        last=metrics[-1],
        environment=environment,
        results=results,
        table=results_table(results) if results else "",
        served_rank=served_rank(config.lora.r),
    )
    return str(card)


def find_license(base: str) -> str | None:
    """What the base's own card says; None where it has none, or the Hub cannot be reached."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard.load(Path(base, "README.md") if Path(base).exists() else base).data.license
    except Exception:  # no card, no network: the Hub's client raises of many kinds
        return None


def prepare_repository(repository: str, private: bool) -> None:
    """Make the repository unless it is there, before anything slow begins.

    Raises:
        InputError: there is no token, it can only read, or the Hub refuses.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise InputError("--push-to-hub: no Hugging Face token: run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:
        if api.whoami().get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise InputError("--push-to-hub: the Hugging Face token can only read: make one that can write")
        api.create_repo(repository, private=private, exist_ok=True)
    except InputError:
        raise
    except Exception as error:  # the Hub's client raises of many kinds
        raise InputError(f"--push-to-hub={repository}: {one_line(error)}") from None


def push(folder: Path, repository: str) -> str:
    """Upload a folder as one commit; files that an earlier attempt uploaded are not sent again.

    Raises:
        InputError: the Hub refuses, or the connection is lost for good.
    """
    from huggingface_hub import HfApi

    try:
        commit = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"stapo_lite {__version__}"
        )
    except Exception as error:  # the Hub's client raises of many kinds
        raise InputError(f"--push-to-hub={repository}: {one_line(error)}; the same command goes on") from None
    return str(commit.repo_url)


def gguf_command(folder: Path, base: str, merged: bool, dtype: str) -> str:
    """How llama.cpp's converter makes a GGUF file of an export, and where to find it if it is not on the PATH."""
    script = "convert_hf_to_gguf.py" if merged else "convert_lora_to_gguf.py"
    found = shutil.which(script)
    outtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    arguments = [found or f"llama.cpp/{script}", str(folder), "--outfile", f"{folder}.gguf", "--outtype", outtype]
    arguments += [] if merged else ["--base" if Path(base).exists() else "--base-model-id", base]
    where = "" if found else f"{script} is not on the PATH; from a checkout of llama.cpp:\n"
    return f"{where}{'' if found else 'python '}{shlex.join(arguments)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stapo_lite.export", description="Export a run's adapter.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its base")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of what is written")
    parser.add_argument("--base-model", help="the base in full precision; by default the run's model")
    parser.add_argument("--evaluation", type=Path, help="output_dir of an evaluation, for the model card")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="repository to push to; made if there is none")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--gguf", action="store_true", help="print llama.cpp's command for a GGUF file")
    arguments = vars(parser.parse_args())
    gguf = arguments.pop("gguf")
    with exit_on_input_error():
        folder = export(**arguments)
        print(f"exported: {folder}")
        if gguf:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            print(gguf_command(folder, manifest["base_model"], manifest["merged"], manifest["dtype"]))


if __name__ == "__main__":
    main()
