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
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stapo_lite import __version__
from stapo_lite.checkpoint import newest_checkpoint, read_state
from stapo_lite.config import Config, InputError, load_config, one_line, one_line_errors, to_yaml
from stapo_lite.data import stop_token_ids
from stapo_lite.files import read_lines, read_object, write_text
from stapo_lite.policy import load_model_config, load_tokenizer
from stapo_lite.rollout.vllm_engine import served_rank
from stapo_lite.scores import results_table
from stapo_lite.tracking import ENVIRONMENT_FILE, EVALUATIONS_FILE, run_metrics

DTYPES = ("float32", "bfloat16", "float16")
MANIFEST = "stapo_lite.json"
SHARD_SIZE = "5GB"
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
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
    """Differences of the exported model's log-probabilities from those of base + adapter, in nats."""

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
    run, final = read_run(Path(run_folder), evaluation), Path(out)
    partial = final.with_name(f".{final.name}.partial")
    base = base_model or run.config.model
    check_base(base, needed_by_others=push_to_hub is not None and not merge)
    tokenizer, model_eos = load_tokenizer(base, 1, [])
    stops = stop_token_ids(tokenizer, model_eos, run.config.data.apply_chat_template)
    digest = hashlib.sha256((run.adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    manifest = {"adapter_sha256": digest, "base_model": base, "merged": merge, "dtype": dtype}
    finished = final.exists()
    if finished and not same_export(final, manifest):
        raise InputError(f"--out={final} exists: delete it, or choose another folder")
    if not finished:
        shutil.rmtree(partial, ignore_errors=True)
        check_disk(partial, base, run.adapter, merge, dtype)
    repository = prepare_repository(push_to_hub, private) if push_to_hub else None

    if finished:
        print(f"{final} holds this export already")
    else:
        if merge:
            temperature = run.config.rollout.temperature
            deviation = write_merged(base, run.adapter, partial, dtype, tokenizer, stops, temperature)
        else:
            deviation = write_adapter(base, run.adapter, partial, dtype, tokenizer)
        check_deviation(deviation, dtype, partial)
        text = json.dumps(manifest | {"stapo_lite": __version__, "deviation": deviation._asdict()}, indent=1)
        (partial / MANIFEST).write_text(text, encoding="utf-8")
    card = model_card(
        repository or final.name, run.config, base, run.metrics, run.environment, run.results, merge, stops
    )
    write_text((final if finished else partial) / "README.md", card)
    if not finished:
        partial.rename(final)
    if repository:
        print(f"pushed: {push(final, repository)}")
    return final


class FinishedRun(NamedTuple):
    """The parts of a run folder that belong to the adapter that is exported."""

    config: Config
    adapter: Path
    metrics: list[dict[str, Any]]
    """Steps up to the adapter's."""
    results: dict[str, Any] | None
    """Of the benchmarks."""
    environment: dict[str, Any]


def read_run(folder: Path, evaluation: str | Path | None) -> FinishedRun:
    """Read a run folder; of a run that goes on, what belongs to its checkpoint.

    Raises:
        InputError: it holds no run with an adapter; the evaluation has no results.
    """
    config, metrics = load_config(folder / "config.yaml"), run_metrics(folder)
    adapter, step = find_adapter(folder)
    step = metrics[-1]["step"] if step is None else step
    results = [line for line in read_lines(folder / EVALUATIONS_FILE) if line["step"] == step]
    if evaluation:
        results = [read_object(Path(evaluation) / "results.json")]
    metrics = [line for line in metrics if line["step"] <= step]
    return FinishedRun(
        config, adapter, metrics, results[-1] if results else None, read_object(folder / ENVIRONMENT_FILE)
    )


def check_base(base: str, needed_by_others: bool) -> None:
    """Raises InputError where the base is quantised, or a local folder that others need."""
    if getattr(load_model_config(base), "quantization_config", None) is not None:
        raise InputError(f"model={base} is quantised: name the base in full precision with --base-model")
    if needed_by_others and Path(base).exists():
        raise InputError(
            f"--push-to-hub: the base {base} is a local folder, of no use to others: --merge, or --base-model"
        )


def check_deviation(deviation: Deviation, dtype: str, folder: Path) -> None:
    """Print how far the export is from base + adapter; InputError where that is more than rounding."""
    report = (
        f"log-probabilities in {dtype}: {deviation.mean:.1e} from base + adapter on average, at most "
        f"{deviation.largest:.1e}; the adapter moves them by {deviation.adapter:.1e}"
    )
    if not (deviation.largest <= LARGEST_IN_FLOAT32 if dtype == "float32" else deviation.mean <= MEAN_IN_HALF):
        raise InputError(f"{folder} is not the model that was trained and was not exported. {report}")
    print(report)


def find_adapter(run_folder: Path) -> tuple[Path, int | None]:
    """The run's final adapter, or that of its newest checkpoint and the checkpoint's step.

    Raises:
        InputError: it has neither.
    """
    if (run_folder / "adapter" / "adapter_config.json").exists():  # the file that is written last
        return run_folder / "adapter", None
    checkpoint = newest_checkpoint(run_folder)
    if checkpoint is None:
        raise InputError(f"{run_folder}: no adapter and no checkpoint yet")
    return checkpoint, read_state(checkpoint)["progress"]["step"]


def same_export(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether the folder is what an export with this manifest wrote."""
    try:
        before = read_object(folder / MANIFEST)
    except InputError:
        return False
    return all(before.get(key) == value for key, value in manifest.items())


def check_disk(folder: Path, base: str, adapter: Path, merge: bool, dtype: str) -> None:
    """Make the folder. Raises InputError where it cannot be made, or what will be written has no room on its disk."""
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
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"--out: {folder} cannot be made ({error.strerror})") from None
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(f"--out needs {needed / 2**30:.1f} GiB, but its disk has {free / 2**30:.1f} GiB left")


def write_merged(
    base: str, adapter: Path, folder: Path, dtype: str, tokenizer: Any, stops: tuple[int, ...], temperature: float
) -> Deviation:
    """Write base + adapter as one model, with everything that serves it.

    Args:
        stops, temperature: how completions ended and were sampled in training.

    Raises:
        InputError: a weight is not the sum of base and adapter.
    """
    from peft import PeftModel
    from transformers import GenerationConfig

    model = PeftModel.from_pretrained(load_base(base, dtype, round_once=True), str(adapter))
    expected, sums = reference(model, tokenizer), first_layer_sums(model, dtype)
    merged: Any = model.merge_and_unload()
    merged.to(getattr(torch, dtype))
    merged.generation_config = GenerationConfig(  # the base's own may limit the length
        eos_token_id=list(stops),
        pad_token_id=merged.config.pad_token_id,
        bos_token_id=merged.config.bos_token_id,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
    )
    merged.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    copy_base_files(base, folder, dtype)
    del model, merged
    gc.collect()  # one model in memory at a time
    written = load_base(str(folder), dtype)
    weights = written.state_dict()
    for name, weight in sums.items():
        # In half precision a lost adapter shows in a few per cent of the weights, another order of sums in one of 1e4.
        differing = (weights[name] != weight).float().mean()
        if not (torch.allclose(weights[name], weight, 1e-5, 1e-6) if dtype == "float32" else differing < 1e-3):
            raise InputError(f"{folder}: {name} is not the sum of base and adapter; nothing was exported")
    return deviation_from(expected, log_probabilities(written, load_tokenizer(str(folder), 1, [])[0]))


@torch.no_grad()
def first_layer_sums(model: Any, dtype: str) -> dict[str, Tensor]:
    """{name: W + scale B A} of the first layer's weights with an adapter, as the merged model must have them: an
    adapter may move log-probabilities by less than half precision does."""
    sums = {}
    for name, module in model.named_modules():
        if ".layers.0." in name and hasattr(module, "lora_A"):
            a, b = (part["default"].weight.double() for part in (module.lora_A, module.lora_B))
            weight = module.base_layer.weight.double() + module.scaling["default"] * b @ a
            sums[f"{name.removeprefix('base_model.model.')}.weight"] = weight.to(getattr(torch, dtype))
    return sums


def write_adapter(base: str, adapter: Path, folder: Path, dtype: str, tokenizer: Any) -> Deviation:
    """Write the adapter in PEFT's format, with the tokenizer and its chat template."""
    from peft import PeftConfig, PeftModel
    from safetensors.torch import load_file, save_file

    peft_config = PeftConfig.from_pretrained(str(adapter))
    peft_config.base_model_name_or_path = base
    peft_config.save_pretrained(str(folder))
    tensors = {k: v.to(getattr(torch, dtype)) for k, v in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    copy_base_files(base, folder, None)
    model = PeftModel.from_pretrained(load_base(base, dtype, round_once=True), str(adapter))
    expected = reference(model, tokenizer)
    plain: Any = model.unload()
    return deviation_from(expected, log_probabilities(PeftModel.from_pretrained(plain, str(folder)), tokenizer))


def copy_base_files(base: str, folder: Path, dtype: str | None) -> None:
    """The base's own tokenizer files, and its `config.json` with another dtype: who can read the base, can read them.

    Args:
        dtype: None for no `config.json`.
    """
    from huggingface_hub import snapshot_download

    source = Path(base)
    if not source.exists():
        source = Path(snapshot_download(base, allow_patterns=[*TOKENIZER_FILES, "config.json"]))
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    if dtype:
        tree = json.loads((source / "config.json").read_text(encoding="utf-8"))
        tree["dtype" if "dtype" in tree else "torch_dtype"] = dtype
        (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def load_base(model: str, dtype: str, round_once: bool = False) -> Any:
    """A causal language model on the CPU.

    Args:
        round_once: in float32, unless its weights are in `dtype` already: what is added to them is then rounded once.

    Raises:
        InputError: its weights cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    if round_once and load_model_config(model).dtype != getattr(torch, dtype):
        dtype = "float32"
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen kinds
        raise InputError(f"model={model}: its weights cannot be loaded ({one_line(error)})") from None


@torch.no_grad()
def log_probabilities(model: Any, tokenizer: Any) -> Tensor:
    """Log-probabilities of each token of the held-out texts but the first, [n] fp32."""
    model.eval()
    found = []
    rows = [torch.tensor(ids) for ids in tokenizer(list(HELD_OUT)).input_ids]
    # The model is causal: padding behind a text changes nothing.
    logits = model(input_ids=pad_sequence(rows, batch_first=True)).logits.float()
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


def model_card(
    name: str,
    config: Config,
    base: str,
    metrics: list[dict[str, Any]],
    environment: dict[str, Any],
    results: dict[str, Any] | None,
    merged: bool,
    stops: tuple[int, ...],
) -> str:
    """The README of the repository, with the Hub's metadata. A folder of this machine is named without its path.

    Args:
        name: repository or folder.
        results: of an evaluation, or a line of the run's `evaluations.jsonl`.
        stops: tokens that ended a completion.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data = config.data
    path = Path(data.source)
    on_this_machine = path.suffix.lower() in (".jsonl", ".parquet") or path.is_absolute() or path.exists()
    local_data = data.source == "arithmetic" or on_this_machine
    metadata = ModelCardData(
        base_model=None if Path(base).exists() else base,
        datasets=None if local_data else [data.source],
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        tags=["stapo_lite", config.algorithm, "reinforcement-learning", "lora"],
    )
    for key, value in find_license(base).items():
        metadata[key] = value
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
        stops=list(stops),
    )
    return str(card)


def find_license(base: str) -> dict[str, str]:
    """The licence in the base's own card; nothing where it has none, or the Hub cannot be reached."""
    from huggingface_hub import ModelCard

    try:
        metadata = ModelCard.load(Path(base, "README.md") if Path(base).exists() else base).data
    except Exception:  # no card, no network: the Hub's client raises of many kinds
        return {}
    return {key: value for key in ("license", "license_name", "license_link") if (value := metadata.get(key))}


def prepare_repository(name: str, private: bool) -> str:
    """Make the repository unless it is there, before anything slow begins; returns its full name.

    Raises:
        InputError: there is no token, it can only read, the repository is public and must not be, or the Hub refuses.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise InputError("--push-to-hub: no Hugging Face token: run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:
        if api.whoami().get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise InputError("--push-to-hub: the Hugging Face token can only read: make one that can write")
        repository = api.create_repo(name, private=private or None, exist_ok=True).repo_id
        api.auth_check(repository, write=True)
        if private and not api.model_info(repository).private:
            raise InputError(f"--private: {repository} is there already, and public")
    except InputError:
        raise
    except Exception as error:  # the Hub's client raises of many kinds
        raise InputError(f"--push-to-hub={name}: {one_line(error)}") from None
    return repository


def push(folder: Path, repository: str) -> str:
    """Upload a folder; files that an earlier attempt uploaded are not sent again. Returns the address.

    Raises:
        InputError: the Hub refuses, or the connection is lost for good.
    """
    from huggingface_hub import HfApi

    try:
        commit = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            ignore_patterns=[MANIFEST],  # it names folders of this machine
            commit_message=f"stapo_lite {__version__}",
        )
    except Exception as error:  # the Hub's client raises of many kinds
        raise InputError(f"--push-to-hub={repository}: {one_line(error)}; the same command goes on") from None
    return str(commit.repo_url)


def gguf_command(folder: Path, base: str, merged: bool, dtype: str) -> str:
    """The command that makes a GGUF file of an export by llama.cpp's converter; with a word on where to find that."""
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
    with one_line_errors():
        folder = export(**arguments)
        print(f"exported: {folder}")
        if gguf:
            manifest = read_object(folder / MANIFEST)
            print(gguf_command(folder, manifest["base_model"], manifest["merged"], manifest["dtype"]))


if __name__ == "__main__":
    main()
