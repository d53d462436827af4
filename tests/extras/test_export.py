"""Exports against base + adapter computed by hand, and pushing them by the Hub's client."""

import json
import re
import resource
import shutil
import sys

import pytest
import torch
from helpers import adapted_policy, command, tiny_qwen3, write_yaml
from huggingface_hub import ModelCard
from peft import LoraModel, PeftModel
from random_model import build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from stapo_lite.config import Train
from stapo_lite.errors import InputError
from stapo_lite.extras.publish.export import export
from stapo_lite.files import write_lines
from stapo_lite.model.policy import make_optimizer
from stapo_lite.training.checkpoint import Progress, save_checkpoint, take_snapshot

MODULE = "stapo_lite.extras.publish.export"


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory):
    """In bfloat16, its head the embedding."""
    return build(tmp_path_factory.mktemp("tied"), tiny_qwen3(tied=True), torch.bfloat16)


@pytest.fixture
def make_run(tied_model, tmp_path):
    def make(base=tied_model, name="run", **changes):
        folder = tmp_path / name
        folder.mkdir()
        adapted_policy(base).save_adapter(folder / "adapter")
        tree = {"model": str(base), "output_dir": str(folder), "lora": {"r": 8, "lora_alpha": 16}}
        tree |= {"data": {"source": "me/sums", "subset": "en", "prompt_suffix": "\nThink!"}}
        write_yaml(folder / "config.yaml", tree | changes)
        write_lines(
            folder / "metrics.jsonl", [{"step": 1, "reward": -0.5}, {"step": 2, "reward": 0.25}]
        )
        environment = {"hardware": "2 x a card", "stapo_lite": "0.1.0"}
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
        return folder

    return make


def by_hand(model, adapter, dtype):
    """{name: weight} of base + adapter: W + alpha / r B A in float64, rounded once."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype="auto").state_dict()
    adapter = saved(adapter)
    for name in weights:
        a, b = (
            adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight")
            for x in "AB"
        )
        if a is not None:
            weights[name] = weights[name].double() + 16 / 8 * b.double() @ a.double()
    return {name: weight.to(dtype) for name, weight in weights.items()}


def saved(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize(
    ("base", "dtype"), [("tied", "float32"), ("tied", "bfloat16"), ("untied", "bfloat16")]
)
def test_a_merged_model_is_the_sum_rounded_once(
    make_run, tied_model, tiny_model, tmp_path, capsys, base, dtype
):
    base = {"tied": tied_model, "untied": tiny_model}[base]
    run = make_run(base)
    export(run, tmp_path / "out", merge=True, dtype=dtype)
    weights, expected = (
        saved(tmp_path / "out"),
        by_hand(base, run / "adapter", getattr(torch, dtype)),
    )
    assert set(expected) - set(weights) == ({"lm_head.weight"} if base == tied_model else set())
    for name, weight in weights.items():
        assert weight.dtype == getattr(torch, dtype)
        if dtype == "float32":
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
        else:  # the sum in float32 falls on the other side of a bf16 midpoint once in a while
            assert (weight != expected[name]).float().mean() <= (1e-3 if "_proj" in name else 0)
    assert (expected["model.layers.0.mlp.up_proj.weight"] != 0).all()
    pattern = rf"log-probabilities in {dtype}: (\S+) from base .* at most (\S+); .* by (\S+)"
    mean, largest, adapter = map(float, re.search(pattern, capsys.readouterr().out).groups())
    assert mean <= largest < (1e-4 if dtype == "float32" else 0.3)
    assert adapter > 0.5
    assert not list(tmp_path.glob(".*partial"))


def test_a_merged_model_has_tokenizer_and_generation_config(
    make_run, tmp_path, tied_model, monkeypatch
):
    monkeypatch.setattr(f"{MODULE}.SHARD_SIZE", "50KB")
    # Such a limit, which Qwen's bases have, would hold for whoever serves the model; such a mixture
    # cannot be saved.
    limits = {"max_new_tokens": 7, "do_sample": False, "temperature": 0.3}
    (tied_model / "generation_config.json").write_text(json.dumps(limits), encoding="utf-8")
    run = make_run(rollout={"temperature": 0.6})
    export(run, tmp_path / "out", merge=True, dtype="float16")
    (tied_model / "generation_config.json").unlink()
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    tokenizer, base = (
        AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", tied_model)
    )
    turns = [{"role": "user", "content": "one and one?"}]
    assert tokenizer.apply_chat_template(turns) == base.apply_chat_template(turns)
    stops = {base.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")}
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert set(generation.eos_token_id) == stops
    assert (generation.do_sample, generation.temperature, generation.top_k, generation.top_p) == (
        True,
        0.6,
        0,
        1.0,
    )
    assert generation.max_new_tokens is None
    assert tokenizer.get_vocab() == base.get_vocab()
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (tied_model, tmp_path / "out")
    )
    assert after == before | {"dtype": "float16"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.float16
    weights = by_hand(tied_model, run / "adapter", torch.float16)
    name = "model.layers.1.mlp.up_proj.weight"
    assert (
        model.state_dict()[name] != weights[name]
    ).float().mean() < 1e-3  # not by way of bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_run_on_4_bits_merges_into_the_base_in_full_precision(make_run, tied_model, tmp_path):
    quantised = shutil.copytree(tied_model, tmp_path / "quantised")
    tree = json.loads((quantised / "config.json").read_text(encoding="utf-8"))
    tree["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    run = make_run(model=str(quantised))
    with pytest.raises(
        InputError, match="is quantised: name the base in full precision with --base-model"
    ):
        export(run, tmp_path / "out", merge=True)
    export(run, tmp_path / "out", merge=True, base_model=str(tied_model))
    export(make_run(name="run4", quantization="nf4"), tmp_path / "nf4", merge=True)
    export(make_run(name="run16"), tmp_path / "plain", merge=True)
    first, *others = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "nf4", "plain")
    )
    assert others == [first, first]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_alone(make_run, tied_model, tmp_path, dtype):
    run = make_run()
    path = run / "adapter" / "adapter_config.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace(str(tied_model), "somewhere/else"),
        encoding="utf-8",
    )
    export(run, tmp_path / "out", dtype=dtype)
    original, written = saved(run / "adapter"), saved(tmp_path / "out")
    assert original.keys() == written.keys()
    assert all(
        torch.equal(written[name], value.to(getattr(torch, dtype)))
        for name, value in original.items()
    )
    base = AutoModelForCausalLM.from_pretrained(tied_model, dtype="auto")
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    assert model.peft_config["default"].base_model_name_or_path == str(tied_model)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_without_a_final_adapter_the_newest_checkpoint_is_exported(make_run, tied_model, tmp_path):
    run = make_run()
    for step in (4, 12):
        policy = adapted_policy(tied_model, adapter_seed=step)
        optimizer = make_optimizer(policy, Train())
        snapshot = take_snapshot(Progress(tau_p=0.002, step=step), policy, optimizer)
        save_checkpoint(run, snapshot, policy, {}, {}, limit=2)
    shutil.rmtree(run / "adapter")
    write_lines(
        run / "metrics.jsonl", [{"step": step, "reward": float(step)} for step in range(1, 15)]
    )
    write_lines(
        run / "evaluations.jsonl", [{"step": step} | RESULTS for step in (0, 14)]
    )  # of other adapters
    export(run, tmp_path / "out", dtype="float32")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| steps | 12 of" in card
    assert "12.000 in the last" in card
    assert "Not evaluated." in card
    written, newest = saved(tmp_path / "out"), saved(run / "checkpoint-12")
    assert written.keys() == newest.keys()
    assert all(torch.equal(value, newest[name]) for name, value in written.items())
    shutil.rmtree(run / "checkpoint-4")
    shutil.rmtree(run / "checkpoint-12")
    with pytest.raises(InputError, match="no adapter and no checkpoint yet"):
        export(run, tmp_path / "other")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_merge_is_not_exported(make_run, tmp_path, monkeypatch, dtype):
    run, out = make_run(), tmp_path / "out"
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self: self.unload())  # the base alone
    with pytest.raises(InputError, match="is not the model that was trained and was not exported"):
        export(run, out, merge=True, dtype=dtype)
    monkeypatch.setattr(f"{MODULE}.log_probabilities", lambda *_: torch.tensor([float("nan")]))
    with pytest.raises(InputError, match="was not exported"):
        export(run, out, dtype=dtype)
    assert not out.exists()


def test_a_failed_export_leaves_no_complete_folder(make_run, tmp_path, monkeypatch):
    run, out, (soft, hard) = make_run(), tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # bytes that a file may have
    try:
        with pytest.raises(InputError, match=f"--out={out}: cannot be written"):
            export(run, out, merge=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with monkeypatch.context() as patch:
        patch.setattr(f"{MODULE}.model_card", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):  # once the model is written
            export(run, out, merge=True)
    assert not out.exists()
    (left,) = tmp_path.glob(".*.partial")
    (left / "stray.safetensors").write_bytes(b"")
    export(run, out, merge=True)
    assert not (out / "stray.safetensors").exists()
    assert not left.exists()
    with pytest.raises(InputError, match="out exists: delete it, or choose another folder"):
        export(run, out)


RESULTS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "max_completion_length": 512,
    "average": {"avg": 0.5, "low": 0.4, "high": 0.6},
}
SCORES = {
    "problems": 30,
    "samples": 32,
    "avg": 0.5,
    "low": 0.4,
    "high": 0.6,
    "maj": 0.55,
    "length": 100.0,
}
RESULTS["benchmarks"] = {"aime24": SCORES | {"truncated": 0.0, "no_answer": 0.01}}


def test_the_card_of_a_merged_model(make_run, tied_model, tmp_path):
    (tied_model / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.json").write_text(json.dumps(RESULTS), encoding="utf-8")
    data = {"source": "me/sums", "subset": "en", "prompt_suffix": "\nThink!"}
    data["chat_template_kwargs"] = {"enable_thinking": False}
    run = make_run(quantization="nf4", data=data)
    export(run, tmp_path / "out", merge=True, evaluation=tmp_path / "eval")
    (tied_model / "README.md").unlink()
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "mit"
    assert card.data.datasets == ["me/sums"]
    assert card.data.library_name == "transformers"
    assert card.data.base_model is None  # a folder of this machine
    for text in (
        f"`{tied_model.name}` with a LoRA adapter merged",
        "| data | `me/sums en train` |",
        "| adapter | rank 8, alpha 16, trained on a base in 4 bits (nf4) |",
        "| steps | 2 of 64 prompts x 8 completions of at most 2048 tokens |",
        "-0.500 in the first step, 0.250 in the last",
        "stapo_lite 0.1.0 ([paper](https://arxiv.org/abs/2602.15620))",
        "temperature 0.7, top-p 0.9, at most 512 tokens",
        "| aime24    | 30       | 32 | 50.0",
        "vllm serve out\n",
        'each followed by "\\nThink!"; arguments of the template: `{"enable_thinking": false}`.',
        "Completions ended with one of the tokens [1, 2].",
    ):
        assert text in card.text, text
    assert str(tmp_path) not in card.text
    with pytest.raises(InputError, match=r"none.results.json: cannot be read"):
        export(run, tmp_path / "other", evaluation=tmp_path / "none")


def test_the_card_of_an_adapter(make_run, tied_model, tmp_path):
    data = {"source": str(tmp_path / "secret" / "mine.jsonl"), "system_prompt": "Be brief."}
    teacher = {"teacher_adapter": str(tmp_path / "secret" / "teacher")}
    (tmp_path / "secret" / "teacher").mkdir(parents=True)
    run = make_run(algorithm="grpo", data=data, objective=teacher)
    write_lines(
        run / "evaluations.jsonl",
        [{"step": 0} | RESULTS, {"step": 2} | RESULTS | {"temperature": 0.3}],
    )
    export(run, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "peft"
    assert card.data.datasets is None
    assert card.data.license is None
    for text in (
        f"A LoRA adapter for `{tied_model.name}`",
        "| data | `mine.jsonl` |",
        "temperature 0.3",
        'model.load_adapter("out")',
        "--enable-lora --max-lora-rank 8 --lora-modules out=out\n",
        'the system prompt "Be brief."',
        "aggregation: sequence-mean\n",
        "teacher_adapter: teacher\n",
        "[1, 2]: `stop_token_ids` in vLLM",
    ):
        assert text in card.text, text
    assert "secret" not in card.text
    data = {"source": "me/sums", "system_prompt": ""}  # none, in place of the chat template's own
    other = make_run(name="other", data=data)
    export(other, tmp_path / "other_out")
    assert (
        ', with the system prompt "".' in ModelCard.load(tmp_path / "other_out" / "README.md").text
    )
    assert "Not evaluated" not in card.text


def test_pushing_a_merged_model(hub, make_run, tmp_path, capsys):
    run, out = make_run(), tmp_path / "out"
    hub.files["me/open"], hub.created["me/open"] = {}, {"visibility": "public"}
    with pytest.raises(InputError, match="open: me/open exists and is public; choose another name"):
        export(run, out, merge=True, push_to_hub="open", private=True)
    hub.cut = 1  # the client tries again by itself
    export(run, out, merge=True, push_to_hub="merged", private=True)
    assert hub.files["me/merged"] == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.created["me/merged"]["visibility"] == "private"
    for name, content in hub.files["me/merged"].items():
        assert str(tmp_path.parent).encode() not in content, (
            f"{name} names a folder of this machine"
        )
    assert f"pushed: {hub.url}/me/merged" in capsys.readouterr().out
    assert "vllm serve me/merged" in (out / "README.md").read_text(encoding="utf-8")
    with pytest.raises(
        InputError, match="is a local folder, of no use to others: --merge, or --base-model"
    ):
        export(run, tmp_path / "adapter", push_to_hub="x")
    hub.cut = 10_000
    again = f"{tmp_path / 'cut'} is complete; upload it with: hf upload me/cut {tmp_path / 'cut'}"
    with pytest.raises(InputError, match=f"--push-to-hub=me/cut: .*; {again}"):
        export(run, tmp_path / "cut", merge=True, push_to_hub="cut")
    assert hub.files["me/cut"] == hub.files["me/open"] == {}
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {
        path.name for path in out.iterdir()
    }


@pytest.mark.parametrize(
    "repository", ["me/x as hf_reader", "them/x", "them/theirs", "not a name!"]
)
def test_missing_permission_is_reported_before_weights_load(
    hub, make_run, tmp_path, monkeypatch, capsys, repository
):
    hub.files["them/theirs"] = {}  # one may read it
    repository, _, token = repository.partition(" as ")
    monkeypatch.setenv("HF_TOKEN", token or "hf_writer")
    monkeypatch.setattr(f"{MODULE}.load_weights", lambda *_, **__: pytest.fail("loaded"))
    assert (
        command(
            "export", make_run(), "--out", tmp_path / "out", "--merge", "--push-to-hub", repository
        )
        == 2
    )
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: --push-to-hub={repository}: ")
    assert error.endswith("; a token that can write comes from `hf auth login`, or HF_TOKEN")
    assert "hf_" not in error
