"""Exports against base + adapter computed by hand, and pushing them by the Hub's client."""

import json
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

from stapo_lite.config import load_config
from stapo_lite.errors import InputError
from stapo_lite.extras.publish.card import read_run
from stapo_lite.extras.publish.export import export
from stapo_lite.files import write_lines

MODULE = "stapo_lite.extras.publish.export"
RESULTS = {"temperature": 0.7, "top_p": 0.9, "max_completion_length": 512}
SCORES = {"problems": 30, "samples": 32, "avg": 0.5, "low": 0.4, "high": 0.6}
RESULTS |= {"model": "merged", "adapter": None}
RESULTS |= {"average": SCORES, "benchmarks": {"aime24": SCORES | {"truncated": 0.0}}}


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory):
    """In bfloat16, its head the embedding."""
    return build(tmp_path_factory.mktemp("tied"), tiny_qwen3(tied=True), torch.bfloat16)


@pytest.fixture
def make_run(tied_model, tmp_path):
    def make(base=tied_model, name="run", scale=0.1, **changes):
        folder = tmp_path / name
        folder.mkdir()
        adapted_policy(base, scale=scale).save_adapter(folder / "adapter")
        tree = {"model": str(base), "output_dir": str(folder), "lora": {"r": 8, "lora_alpha": 16}}
        write_yaml(folder / "config.yaml", tree | {"data": {"source": "me/sums"}} | changes)
        metrics = [{"step": 1, "reward": -0.5}, {"step": 2, "reward": 0.25}]
        write_lines(folder / "metrics.jsonl", metrics)
        environment = {"hardware": "2 x a card", "stapo_lite": "0.1.0"}
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
        return folder

    return make


def by_hand(model, adapter, dtype):
    """{name: weight} of base + adapter: W + alpha / r B A in float64, rounded once."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype="auto").state_dict()
    values = saved(adapter)
    for name in weights:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (values.get(f"{layer}.lora_{x}.weight") for x in "AB")
        if a is not None:
            weights[name] = weights[name].double() + 16 / 8 * b.double() @ a.double()
    return {name: weight.to(dtype) for name, weight in weights.items()}


def saved(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_merge_is_the_sum_rounded_once(make_run, tied_model, tiny_model, tmp_path, tied, dtype):
    """Into the base in full precision, also if it was trained on 4 bits."""
    base = tied_model if tied else tiny_model
    run = make_run(base, quantization="nf4" if tied else None)
    export(run, tmp_path / "out", merge=True, dtype=dtype)
    weights = saved(tmp_path / "out")
    expected = by_hand(base, run / "adapter", getattr(torch, dtype))
    assert set(expected) - set(weights) == ({"lm_head.weight"} if tied else set())
    for name, weight in weights.items():
        assert weight.dtype == getattr(torch, dtype)
        if dtype == "float32":
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
        else:  # the sum in float32 falls on the other side of a midpoint once in a while
            assert (weight != expected[name]).float().mean() <= (1e-3 if "_proj" in name else 0)


def test_a_merged_model_can_be_served(make_run, tmp_path, tied_model, monkeypatch):
    monkeypatch.setattr(f"{MODULE}.SHARD_SIZE", "50KB")
    # Such a limit, which Qwen's bases have, would hold for whoever serves the model; such a mixture
    # cannot be saved.
    limits = {"max_new_tokens": 7, "do_sample": False, "temperature": 0.3}
    base, out = shutil.copytree(tied_model, tmp_path / "base"), tmp_path / "out"
    (base / "generation_config.json").write_text(json.dumps(limits), encoding="utf-8")
    export(make_run(base, rollout={"temperature": 0.6}), out, merge=True, dtype="float16")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    new, old = (AutoTokenizer.from_pretrained(path) for path in (out, base))
    assert (new.get_vocab(), new.chat_template) == (old.get_vocab(), old.chat_template)
    generation = GenerationConfig.from_pretrained(out)
    stops = {old.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")}
    assert set(generation.eos_token_id) == stops
    assert (generation.do_sample, generation.max_new_tokens) == (True, None)
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.6, 0, 1.0)
    before, after = (json.loads((path / "config.json").read_text()) for path in (base, out))
    assert after == before | {"dtype": "float16"}
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.float16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_alone(make_run, tied_model, tmp_path, dtype):
    run = make_run()
    path = run / "adapter" / "adapter_config.json"
    text = path.read_text(encoding="utf-8").replace(str(tied_model), "somewhere/else")
    path.write_text(text, encoding="utf-8")
    export(run, tmp_path / "out", dtype=dtype)
    written = saved(tmp_path / "out")
    original = {name: v.to(getattr(torch, dtype)) for name, v in saved(run / "adapter").items()}
    torch.testing.assert_close(written, original, rtol=0, atol=0)
    base = AutoModelForCausalLM.from_pretrained(tied_model)
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    assert model.peft_config["default"].base_model_name_or_path == tied_model.name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


@pytest.mark.parametrize("scale", [0.01, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_wrong_merge_is_not_exported(make_run, tmp_path, monkeypatch, dtype, scale):
    run, out = make_run(scale=scale), tmp_path / "out"
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self: self.unload())  # the base alone
    with pytest.raises(InputError, match="is not the model that was trained and was not exported"):
        export(run, out, merge=True, dtype=dtype)
    monkeypatch.setattr(f"{MODULE}.log_probabilities", lambda *_: torch.tensor([float("nan")]))
    with pytest.raises(InputError, match="was not exported"):
        export(run, out, dtype=dtype)
    assert not out.exists()


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e-3, 0.02])
def test_rounding_that_hides_an_adapters_effect_prevents_no_export(make_run, tmp_path, scale):
    for merge in (False, True):
        export(make_run(scale=scale, name=f"{merge}"), tmp_path / f"out {merge}", merge=merge)


def test_an_interrupted_export_leaves_no_complete_folder(make_run, tmp_path, monkeypatch):
    run, out = make_run(), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(f"{MODULE}.model_card", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):  # once the model is written
            export(run, out, merge=True)
    assert [path.name for path in tmp_path.glob("*out*")] == [".out.partial"]
    export(run, out, merge=True)
    assert [path.name for path in tmp_path.glob("*out*")] == ["out"]
    with pytest.raises(InputError, match="out exists: delete it, or choose another folder"):
        export(run, out)


def test_what_cannot_be_exported(make_run, tied_model, tmp_path):
    base, run = shutil.copytree(tied_model, tmp_path / "base"), make_run()
    tree = json.loads((base / "config.json").read_text(encoding="utf-8"))
    tree["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(InputError, match="is quantised: .* full precision with --base-model"):
        export(run, tmp_path / "out", base_model=str(base))
    (run / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(InputError, match="the run has not ended; --resume it"):
        export(run, tmp_path / "out")


def test_the_card_of_an_adapter_without_rewards_names_no_local_path(make_run, tmp_path):
    secret = tmp_path / "secret"
    (secret / "teacher").mkdir(parents=True)
    data = {"source": str(secret / "mine"), "system_prompt": ""}  # not the template's own prompt
    teacher = {"teacher_adapter": str(secret / "teacher")}
    lora = {"r": 8, "lora_alpha": 16, "adapter": str(secret / "gone" / "start")}
    teacher["teacher_server"] = "http://secret:8000"
    run = make_run(algorithm="distill", data=data, objective=teacher, lora=lora)
    write_lines(run / "metrics.jsonl", [{"step": 1}, {"step": 2}])
    write_lines(run / "evaluations.jsonl", [{"step": 0} | RESULTS, {"step": 2, "temperature": 3}])
    export(run, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.datasets, card.data.library_name) == (None, "peft")
    for text in (
        "| data | `mine` |",
        "| mean reward | - in the first step, - in the last |",
        "Sampled at temperature 3, ",
        "--enable-lora --max-lora-rank 8 --lora-modules out=out\n",
        ', with the system prompt "".',
        "teacher_adapter: teacher\n",
        "started from `start`",
    ):
        assert text in card.text, text
    assert "secret" not in card.text


def test_pushing_a_merged_model_with_its_card(hub, make_run, tmp_path, capsys):
    data = {"source": "me/sums-1.5", "subset": "en", "prompt_suffix": "\nThink!"}
    data["chat_template_kwargs"] = {"enable_thinking": False}
    run, out, cut = make_run(quantization="nf4", data=data), tmp_path / "out", tmp_path / "cut"
    hub.files["me/open"], hub.created["me/open"] = {}, {"visibility": "public"}
    with pytest.raises(InputError, match="open: me/open exists and is public; choose another name"):
        export(run, out, merge=True, push_to_hub="open", private=True)
    of_the_base = RESULTS | {"model": load_config(run / "config.yaml").model}
    (run / "results.json").write_text(json.dumps(of_the_base), encoding="utf-8")
    with pytest.raises(InputError, match="--evaluation=.*: of the base, without the adapter"):
        export(run, out, evaluation=run)
    (run / "results.json").write_text(json.dumps(RESULTS), encoding="utf-8")
    hub.cut = 1  # the client tries again by itself
    export(run, out, merge=True, push_to_hub="merged", private=True, evaluation=run)
    files = hub.files["me/merged"]
    assert files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.created["me/merged"]["visibility"] == "private"
    assert f"pushed: {hub.url}/me/merged" in capsys.readouterr().out
    assert [n for n, content in files.items() if str(tmp_path.parent).encode() in content] == []
    card = ModelCard.load(out / "README.md")
    assert (card.data.datasets, card.data.base_model) == (["me/sums-1.5"], None)
    for text in (
        "| data | `me/sums-1.5 en train` |",
        "| adapter | rank 8, alpha 16, trained on a base in nf4 |",
        "| steps | 2 of 64 prompts x 8 completions of at most 2048 tokens |",
        "-0.500 in the first step, 0.250 in the last",
        "| aime24 | 30 | 32 | 50.0",
        "vllm serve me/merged ",
        'each followed by "\\nThink!"; arguments of the template: `{"enable_thinking": false}`.',
    ):
        assert text in " ".join(card.text.split()), text
    hub.cut = 10_000
    again = f"{cut} is complete; upload it with: hf upload me/cut {cut}"
    with pytest.raises(InputError, match=f"--push-to-hub=me/cut: .*; {again}"):
        export(run, cut, merge=True, push_to_hub="cut")
    assert hub.files["me/cut"] == hub.files["me/open"] == {}
    assert {path.name for path in cut.iterdir()} == set(files)


@pytest.mark.parametrize("name", ["me/x as hf_reader", "them/x", "them/theirs", "not a name!"])
def test_permission_is_checked_first(hub, make_run, tmp_path, monkeypatch, capsys, name):
    hub.files["them/theirs"] = {}  # one may read it
    name, _, token = name.partition(" as ")
    monkeypatch.setenv("HF_TOKEN", token or "hf_writer")
    monkeypatch.setattr(f"{MODULE}.load_weights", lambda *_, **__: pytest.fail("loaded"))
    out = ["--out", tmp_path / "out", "--merge", "--push-to-hub", name]
    assert command("export", make_run(), *out) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: --push-to-hub={name}: ")
    assert error.endswith("; a token that can write comes from `hf auth login`, or HF_TOKEN")
    assert "hf_" not in error


def test_an_evaluation_before_the_last_step_is_of_another_adapter(make_run):
    run = make_run()
    write_lines(run / "evaluations.jsonl", [{"step": 1} | RESULTS])
    assert read_run(run, None).results is None
    write_lines(run / "evaluations.jsonl", [{"step": 1} | RESULTS, {"step": 2, "reward": 0.5}])
    assert read_run(run, None).results == {"step": 2, "reward": 0.5}


def test_the_command_passes_its_options_on(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(f"{MODULE}.export", lambda *_, **options: given.update(options))
    options = ["--merge", "--private", "--dtype", "float16", "--base-model", "b"]
    options += ["--push-to-hub", "me/x"]
    assert command("export", "run", "--out", "out", *options, "--evaluation", tmp_path) == 0
    expected = {"merge": True, "dtype": "float16", "base_model": "b", "evaluation": tmp_path}
    assert given == expected | {"push_to_hub": "me/x", "private": True}
