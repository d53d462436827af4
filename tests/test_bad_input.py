"""Malformed configs, data sets, models and checkpoints: one line, status 2, nothing overwritten. And fuzzing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import command, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stapo_lite import data
from stapo_lite.answers import final_answer
from stapo_lite.checkpoint import CHECKSUMS_FILE, _digest, flatten
from stapo_lite.config import Config, InputError, Prompting, load_config, load_eval_config
from stapo_lite.files import read_jsonl


def contents(folder: Path) -> dict[str, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock" and p.parent.name != "__pycache__"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture
def refused(monkeypatch, capsys, caplog, tmp_path):
    """The one line that the command says about its input; the folders are as they were."""

    monkeypatch.chdir(tmp_path)

    def check(config, *arguments):
        before = contents(tmp_path)
        status = command(monkeypatch, config, *arguments)
        printed = capsys.readouterr()
        errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert status == 2, printed.err[-2000:]
        assert len(errors) == 1, printed.err[-2000:]
        assert "Traceback" not in printed.err
        assert len(errors[0]) < 1500
        assert contents(tmp_path) == before
        return errors[0]

    return check


CONFIGS = {
    # the file's bytes: what is said
    "empty": (b"", "must be a YAML mapping"),
    "a list": (b"- model: m", "must be a YAML mapping"),
    "text": (b"model", "must be a YAML mapping"),
    "bad UTF-8": (b"model: \xff\xfe\xfa", "cannot be read as YAML"),
    "zero bytes": (b"model: a\0b", "cannot be read as YAML"),
    "an open bracket": (b"model: [", "cannot be read as YAML"),
    "a tab": (b"train:\n\tmax_steps: 3", "cannot be read as YAML"),
    "a Python object": (b"model: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    "a key twice": (b"model: a\nmodel: b\noutput_dir: o", "the key 'model' stands there twice"),
    "nested without end": (b"[" * 5000, "cannot be read as YAML"),
    "a number too long": (b"seed: " + b"9" * 5000, "cannot be read as YAML"),
    "a bomb of aliases": (
        b"model: m\noutput_dir: o\na: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 112)),
        "unknown key 'a'",
    ),
    "an anchor to itself": (b"model: &a [*a]\noutput_dir: o", "key 'model': input should be a valid string"),
    "a number for a key": (b"1: 2\nmodel: m\noutput_dir: o", "key '1': keys should be strings"),
    "null for a section": (b"model: m\noutput_dir: o\ntrain: null", "key 'train'"),
    "a list for a section": (b"model: m\noutput_dir: o\ntrain: [1]", "key 'train'"),
    "not a number": (b"model: m\noutput_dir: o\ntrain: {learning_rate: .nan}", "key 'train.learning_rate'"),
    "infinite": (b"model: m\noutput_dir: o\ntrain: {max_grad_norm: .inf}", "key 'train.max_grad_norm'"),
    "a date": (b"model: 2026-11-20\noutput_dir: o", "key 'model': input should be a valid string"),
    "negative": (b"model: m\noutput_dir: o\ntrain: {batch_size: -4}", "key 'train.batch_size'"),
    "too large": (b"model: m\noutput_dir: o\nseed: 99999999999", "key 'seed'"),
    "no model": (b"output_dir: o", "key 'model' is required"),
    "an unknown symptom": (b"model: m\noutput_dir: o\nstop_on: [boredom]", "key 'stop_on.0'"),
    "a name with a path": (b"model: m\noutput_dir: o\nlog: {project: ../../etc}", "key 'log.project'"),
    "a name that is a path": (b"model: m\noutput_dir: o\nlog: {project: /etc}", "key 'log.project'"),
    "batches that do not divide": (b"model: m\noutput_dir: o\ntrain: {batch_size: 10}", "train.batch_size=10"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_malformed_configs(refused, tmp_path, case):
    source, message = CONFIGS[case]
    (tmp_path / "c.yaml").write_bytes(source)
    assert message in refused(tmp_path / "c.yaml")


OVERRIDES = {
    "no value": ("train", "write it as key.sub=value"),
    "no key": ("=3", "write it as key.sub=value"),
    "dots": ("train..max_steps=3", "unknown key 'train.'"),
    "no YAML": ("seed=]", "the value is not YAML"),
    "too deep": ("seed=" + "[" * 5000, "the value is not YAML"),
    "a value as section": ("model.name=3", "model is a value, not a section"),
    "a key twice": ("train={max_steps: 1, max_steps: 2}", "the key 'max_steps' stands there twice"),
    "a zero byte": ('output_dir="a\\0b"', "key 'output_dir': no file can be called so"),
    "a name too long": ("data.source=" + "x" * 300 + ".jsonl", "key 'data.source': no file can be called so"),
    "a timeout beyond clocks": ("reward.function_timeout=1e300", "key 'reward.function_timeout'"),
    "an empty folder name": ("output_dir=", "key 'output_dir'"),
    "no such reward": ("reward.functions=[nowhere:f]", "cannot be imported (ModuleNotFoundError"),
    "a reward that is no path": ("reward.functions=['__import__(\"os\")']", "use math, arithmetic or package.module"),
    "zero for a file": ("output_dir=/dev/null/run", "cannot be written"),
    "a folder that is a file": ("output_dir={tmp}/notes.txt", "cannot be written"),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_malformed_overrides(refused, write_config, tmp_path, case):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    override, message = OVERRIDES[case]
    assert message in refused(write_config(), override.replace("{tmp}", str(tmp_path)))


def row(prompt='"say one"', answer='"1"', more=""):
    return f'{{"prompt": {prompt}, "answer": {answer}{more}}}'.encode()


GOOD = row()
DATASETS = {
    # the file's bytes: what is said
    "empty": (b"", "no rows"),
    "blank lines": (b"\n \n\n", "no rows"),
    "bad UTF-8": (GOOD + b'\n{"prompt": "\xff", "answer": "1"}', "line 2: not JSON"),
    "two lines of UTF-16": ('{"prompt": "a", "answer": "1"}'.encode("utf-16"), "line 1: not JSON"),
    "zeros": (b"\0" * 1000, "line 1: not JSON"),
    "cut off": (GOOD + b"\n" + GOOD[:-5], "line 2: not JSON"),
    "a list": (b"[1, 2]", "line 1: must be a JSON object, got list"),
    "a number": (GOOD + b"\n3", "line 2: must be a JSON object, got int"),
    "CSV": (b"prompt,answer\nsay,1", "line 1: not JSON"),
    "two in a line": (GOOD + GOOD, "line 1: not JSON"),
    "nested without end": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1: not JSON"),
    "a number too long": (b'{"prompt": "a", "answer": ' + b"9" * 10_000 + b"}", "line 1: not JSON"),
    "null prompt": (GOOD + b"\n" + row("null"), "row 2: the prompt must be text or a list of"),
    "a number as prompt": (row("3"), "row 1: the prompt must be text or a list of"),
    "a nested prompt": (row('[[{"role": "user", "content": "a"}]]'), "row 1: the prompt must be text or a list of"),
    "an object as prompt": (row('{"role": "user"}'), "row 1: the prompt must be text or a list of"),
    "parts as content": (row('[{"role": "user", "content": [{"text": "a"}]}]'), "row 1: the prompt must be"),
    "no messages": (row("[]"), "row 1: the prompt must be"),
    "null content": (row('[{"role": "user", "content": null}]'), "row 1: the prompt must be"),
    "half a surrogate": (row('"say \\ud800"'), "row 1: the prompt is not valid Unicode"),
    "half a surrogate in a message": (
        row('[{"role": "user", "content": "\\udfff"}]'),
        "row 1: the prompt is not valid",
    ),
    "missing prompt": (GOOD + b'\n{"answer": "1"}', "row 2: the prompt must be"),
    "missing answer": (GOOD + b'\n{"prompt": "a"}', "row 2: data.answer_column=answer is empty"),
    "null answer": (row(answer="null"), "row 1: data.answer_column=answer is empty"),
    "blank answer": (row(answer='"  "'), "row 1: data.answer_column=answer is empty"),
    "a list as answer": (row(answer='["1"]'), "row 1: data.answer_column=answer must be text or a number, got list"),
    "an object as answer": (row(answer='{"a": 1}'), "row 1: data.answer_column=answer must be text or a number"),
    "true as answer": (row(answer="true"), "row 1: data.answer_column=answer must be text or a number, got bool"),
    "no answer column": (b'{"prompt": "a"}', "data.answer_column=answer: "),
    "10 MB in a row": (row(f'"{"one two " * 1_300_000}"'), "row 1: the prompt has"),
    "an id twice": (
        row(more=', "id": 7') + b"\n" + row('"say two"', more=', "id": 7'),
        "1 ids occur more than once, as 7",
    ),
}


@pytest.mark.parametrize("case", DATASETS)
def test_malformed_datasets(refused, write_config, tmp_path, case):
    source, message = DATASETS[case]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_bytes(source)
    config = write_config(reward={"functions": ["arithmetic"]})
    (tmp_path / "prompts.jsonl").write_bytes(source)
    assert message in refused(config)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("a.parquet", b"PAR1 but no more", "neither `arithmetic` nor a readable"),
        ("a.parquet", b"", "neither `arithmetic` nor a readable"),
        ("folder.jsonl", None, "no such file"),
        ("nowhere.parquet", b"-", "no such file"),
        ("a.csv", b"prompt,answer", "neither `arithmetic` nor a readable"),
        ("../../../etc", b"-", "neither `arithmetic` nor a readable"),
    ],
)
def test_files_that_are_no_dataset(refused, write_config, tmp_path, name, source, message):
    path = tmp_path / name
    if source is None:
        path.mkdir()
    elif source != b"-":
        path.write_bytes(source)
    assert message in refused(write_config(), f"data.source={path}")


def spoil(model: Path, name: str, change) -> None:
    """Change a JSON file of the model."""
    tree = json.loads((model / name).read_text(encoding="utf-8"))
    change(tree)
    (model / name).write_text(json.dumps(tree), encoding="utf-8")


def change_weights(model: Path, change) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def nest(model: Path, **decoder) -> None:
    """A Gemma 3 that reads images, whose decoder has a config of its own."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 260}
    text = {"model_type": "gemma3_text"} | heads | size | decoder
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}), encoding="utf-8")


LAYER = "model.layers.1.mlp.up_proj.weight"
MODELS = {
    "no folder": (shutil.rmtree, "not a causal language model"),
    "an empty folder": (lambda m: [p.unlink() for p in m.iterdir()], "not a causal language model"),
    "no config": (lambda m: (m / "config.json").unlink(), "not a causal language model"),
    "a config cut off": (lambda m: (m / "config.json").write_text("{"), "not a causal language model"),
    "a config that is a list": (lambda m: (m / "config.json").write_text("[]"), "not a causal language model"),
    "an unknown kind": (
        lambda m: spoil(m, "config.json", lambda c: c.update(model_type="qwen99")), "not a causal language model",
    ),
    "no language model": (
        lambda m: spoil(m, "config.json", lambda c: c.update(model_type="vit")), "not a causal language model",
    ),
    "code of its own": (
        lambda m: spoil(m, "config.json", lambda c: c.update(
            model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
        ),
        "not a causal language model",
    ),
    "logits that are capped, in the decoder's own config": (
        lambda m: nest(m, final_logit_softcapping=30.0), "its logits are transformed after the head (final_logit_softc",
    ),
    "a context that is too short, in the decoder's own config": (
        lambda m: nest(m, final_logit_softcapping=None, max_position_embeddings=32), "holds 32 tokens, but data.max_",
    ),
    "no tokenizer": (
        lambda m: [p.unlink() for p in m.iterdir() if "token" in p.name or "chat" in p.name],
        "has no tokenizer",
    ),
    "a tokenizer cut off": (lambda m: (m / "tokenizer.json").write_text('{"version'), "not a causal language model"),
    "a chat template with an error": (
        lambda m: (m / "chat_template.jinja").write_text("{% for %}"), "row 1: the model's chat template refuses",
    ),
    "a chat template that reaches out": (
        lambda m: (m / "chat_template.jinja").write_text(
            "{{ messages.__class__.__mro__[1].__subclasses__()[0]('x').system('true') }}"),
        "row 1: the model's chat template refuses",
    ),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "not a causal language model"),
    "weights cut off": (
        lambda m: (m / "model.safetensors").write_bytes((m / "model.safetensors").read_bytes()[:5000]),
        "not a causal language model",
    ),
    "weights that are a pickle": (
        lambda m: (m / "model.safetensors").write_bytes(b"\x80\x04\x95cos\nsystem\n"), "not a causal language model",
    ),
    "a weight that is missing": (
        lambda m: change_weights(m, lambda w: w.pop(LAYER)), f"its weights lack {LAYER}",
    ),
    "a weight of another shape": (
        lambda m: change_weights(m, lambda w: w.update({LAYER: torch.zeros(3, 3)})), "not a causal language model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_malformed_models(refused, write_config, tiny_model, tmp_path, case):
    change, message = MODELS[case]
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    change(model)
    assert message in refused(write_config(), f"model={model}")


def rewrite(checkpoint: Path, change) -> None:
    """Change `state.json` and make its checksum right."""
    spoil(checkpoint, "state.json", change)
    spoil(checkpoint, CHECKSUMS_FILE, lambda sums: sums.update({"state.json": _digest(checkpoint / "state.json")}))


def replace_tensors(checkpoint: Path, name: str, tensors) -> None:
    save_file(tensors, checkpoint / name, {"format": "pt"})
    spoil(checkpoint, CHECKSUMS_FILE, lambda sums: sums.update({name: _digest(checkpoint / name)}))


CHECKPOINTS = {
    "no progress": (lambda c: rewrite(c, lambda s: s.pop("progress")), "state.json is not that of a checkpoint"),
    "a step that is text": (lambda c: rewrite(c, lambda s: s["progress"].update(step="two")), "is not that of a check"),
    "a negative number": (lambda c: rewrite(c, lambda s: s["progress"].update(halvings=-1)), "is not that of a check"),
    "a list for the config": (lambda c: rewrite(c, lambda s: s.update(config=[])), "is not that of a checkpoint"),
    "metrics that are no JSON": (lambda c: (c.parent / "metrics.jsonl").write_text("x\n"), "line 1: not JSON"),
    "metrics that are lists": (lambda c: (c.parent / "metrics.jsonl").write_text("[1]\n"), "line 1: must be a JSON"),
    "progress of another version": (
        lambda c: rewrite(c, lambda s: s["progress"].update(epoch=1)), "state.json is not that of a checkpoint",
    ),
    "no optimiser": (lambda c: rewrite(c, lambda s: s.pop("optimizer")), "state.json is not that of a checkpoint"),
    "half an optimiser": (
        lambda c: rewrite(c, lambda s: s["optimizer"].pop("param_groups")), "does not fit this run (KeyError",
    ),
    "no config": (lambda c: rewrite(c, lambda s: s.pop("config")), "state.json is not that of a checkpoint"),
    "a list as state": (lambda c: replace_state(c, "[]"), "state.json: must be a JSON object, got list"),
    "another adapter": (
        lambda c: replace_tensors(c, "adapter_model.safetensors", {"a": torch.zeros(2)}), "the adapter does not fit",
    ),
    "an adapter of another rank": (
        lambda c: replace_tensors(c, "adapter_model.safetensors", {
            name: (value[:4] if "lora_A" in name else value[:, :4]).contiguous()
            for name, value in load_file(c / "adapter_model.safetensors").items()}),
        "does not fit this run (RuntimeError",
    ),
    "moments of another shape": (
        lambda c: replace_tensors(c, "optimizer.safetensors", {
            k: torch.zeros(2, 2) for k in load_file(c / "optimizer.safetensors")}),
        "does not fit this run (ValueError",
    ),
    "fewer parameters": (
        lambda c: rewrite(c, lambda s: s["optimizer"]["param_groups"][0].update(params=[0])),
        "does not fit this run (ValueError",
    ),
    "torn, and the only one": (lambda c: (c / "state.json").write_text("{"), "holds only damaged checkpoints"),
}  # fmt: skip


def replace_state(checkpoint: Path, text: str) -> None:
    (checkpoint / "state.json").write_text(text, encoding="utf-8")
    spoil(checkpoint, CHECKSUMS_FILE, lambda sums: sums.update({"state.json": _digest(checkpoint / "state.json")}))


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_malformed_checkpoints(refused, write_config, tmp_path, case):
    change, message = CHECKPOINTS[case]
    run(write_config(train__max_steps=2))
    change(tmp_path / "run" / "checkpoint-2")
    assert message in refused(write_config(), "--resume")


def test_a_resumed_run_whose_data_is_gone_changes_nothing(refused, write_config, tmp_path):
    run(write_config(train__max_steps=2))
    config = write_config()
    (tmp_path / "prompts.jsonl").unlink()
    assert "no such file" in refused(config, "--resume")


def test_there_are_more_than_sixty():
    assert sum(map(len, (CONFIGS, OVERRIDES, DATASETS, MODELS, CHECKPOINTS))) >= 60


# Fuzzing: a config or an InputError of one line, whatever is given.

quick = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
KEYS = st.sampled_from([*Config.model_fields, "max_steps", "r", "s2t", "tau_p", "", "a.b", 3, None, True])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
KNOWN = [key for key in flatten(Config(model="m", output_dir="o").model_dump()) if "." in key]


def accepted_or_one_line(load) -> None:
    message = ""
    try:
        load()
    except InputError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1500


@quick
@given(tree=st.dictionaries(KEYS, VALUES, max_size=4), minimal=st.booleans())
def test_any_tree_is_a_config_or_one_line(tree, minimal):
    base = {"model": "m", "output_dir": "o"} if minimal else {}
    for load in (load_config, load_eval_config):
        accepted_or_one_line(lambda load=load: load(base | tree))


@quick
@given(source=st.binary(max_size=60) | st.text(alphabet="model:[]{}-&*!#'\"\n \t1.a", max_size=60).map(str.encode))
def test_any_file_is_a_config_or_one_line(tmp_path, source):
    (tmp_path / "c.yaml").write_bytes(source)
    accepted_or_one_line(lambda: load_config(tmp_path / "c.yaml"))


@quick
@given(key=st.sampled_from(KNOWN) | st.text(max_size=8), value=st.text(max_size=12) | VALUES.map(repr))
def test_any_override_is_taken_or_one_line(key, value):
    accepted_or_one_line(lambda: load_config({"model": "m", "output_dir": "o"}, [f"{key}={value}"]))


LINES = VALUES.map(lambda value: json.dumps(value, default=str, skipkeys=True))
MESSAGES = st.fixed_dictionaries({"role": st.text(max_size=4) | st.just("user"), "content": VALUES})
PIECES = st.sampled_from([
    "\\boxed{", "}", "{", "$", "$$", "\\frac", "the answer is", "####", "\\text{", "\\left(", "12", "-", ".", ",", "\n",
    "e-5", "**", "\\", "½", "\ud800", "answer:", "(A)", "^", "_", "\\begin{pmatrix}", "&", "%",
])  # fmt: skip


@quick
@given(text=st.text(max_size=80) | st.lists(PIECES, max_size=40).map("".join), finished=st.booleans())
def test_any_response_has_a_final_answer_or_none(text, finished):
    answer = final_answer(text, finished)
    assert answer is None or isinstance(answer, str)


def test_long_responses_take_no_longer_than_their_length():
    for piece in ("\\boxed{", "{", "$", "the answer is ", "\\frac{", "(", "1,", "####"):
        final_answer(piece * 20_000, True)


@quick
@given(
    source=st.binary(max_size=80)
    | st.lists(VALUES.map(lambda v: json.dumps(v, default=str, skipkeys=True)), max_size=3)
    .map("\n".join)
    .map(str.encode)
)
def test_any_file_is_a_dataset_or_one_line(tmp_path, source):
    (tmp_path / "d.jsonl").write_bytes(source)
    accepted_or_one_line(lambda: read_jsonl(tmp_path / "d.jsonl"))


@quick
@given(
    prompt=VALUES
    | st.lists(st.fixed_dictionaries({"role": st.text(max_size=4) | st.just("user"), "content": VALUES}), max_size=3),
    answer=VALUES,
)
def test_any_row_is_a_prompt_or_one_line(tiny_model, prompt, answer):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    accepted_or_one_line(
        lambda: data.render_prompts(
            [{"prompt": prompt, "answer": answer}], tokenizer, Prompting(max_prompt_length=100), "d.jsonl", "prompt",
            "answer", filter_overlong=False,
        )
    )  # fmt: skip
