"""Malformed configs, data sets, models and checkpoints: one line, status 2, nothing overwritten.
And fuzzing."""

import json
import shutil
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from helpers import MINIMAL, command, run, write_yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stapo_lite.config import Config, Data, flatten, load_config, load_eval_config
from stapo_lite.data.prompts import Prompts
from stapo_lite.errors import InputError
from stapo_lite.extras.math.answers import final_answer
from stapo_lite.files import read_jsonl


def contents(folder: Path) -> dict[str, bytes]:
    files = [
        p
        for p in folder.rglob("*")
        if p.is_file() and p.name != ".lock" and p.parent.name != "__pycache__"
    ]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """The one line that the command says about its input; the folders are as they were."""
    monkeypatch.chdir(tmp_path)

    def check(config, *arguments):
        before = contents(tmp_path)
        status = command("train", config, *arguments)
        printed = capsys.readouterr().err
        errors = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert (status, len(errors)) == (2, 1), printed[-2000:]
        assert "Traceback" not in printed
        assert len(errors[0]) < 1500
        assert contents(tmp_path) == before
        return errors[0]

    return check


DOUBLINGS = [b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 112)]
BOMB = b"model: m\noutput_dir: o\ndata: {source: a}\na: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    DOUBLINGS
)
CONFIGS = [
    (b"", "must be a YAML mapping"),
    (b"model: \xff\xfe\xfa", "cannot be read as YAML"),
    (b"model: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    (b"model: a\nmodel: b\noutput_dir: o", "the key 'model' is given twice"),
    (b"[" * 5000, "cannot be read as YAML"),
    (b"seed: " + b"9" * 5000, "cannot be read as YAML"),
    (BOMB, "unknown key 'a'"),
    (b"model: &a [*a]\noutput_dir: o", "key 'model'"),
    (b"1: 2\nmodel: m\noutput_dir: o\ndata: {source: a}", "key '1'"),
    (
        b"model: m\noutput_dir: o\ndata: {source: a}\ntrain: {learning_rate: .nan}",
        "key 'train.learning_rate'",
    ),
    (b"output_dir: o", "key 'model' is required"),
    (b"model: m\noutput_dir: o\ndata: {}", "key 'data.source' is required"),
    (b"model: m\noutput_dir: o\ndata: {source: a}\nlog: {project: /etc}", "key 'log.project'"),
]


@pytest.mark.parametrize(("source", "message"), CONFIGS, ids=range(len(CONFIGS)))
def test_malformed_configs(refused, tmp_path, source, message):
    (tmp_path / "c.yaml").write_bytes(source)
    assert message in refused(tmp_path / "c.yaml")


OVERRIDES = {
    "=3": "write it as key.sub=value",
    "seed=" + "[" * 5000: "the value is not YAML",
    "model.name=3": "model is a value, not a section",
    "train={max_steps: 1, max_steps: 2}": "the key 'max_steps' is given twice",
    "reward.functions=['__import__(\"os\")']": "use math or package.module",
    "output_dir=/dev/null/run": "cannot be written",
    "output_dir=notes.csv": "cannot be written",
    "data.source=folder.jsonl": "no such file",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=range(len(OVERRIDES)))
def test_malformed_overrides(refused, write_config, tmp_path, override):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "notes.csv").write_text("mine", encoding="utf-8")
    assert OVERRIDES[override] in refused(write_config(), override)


def row(prompt='"say one"', answer='"1"'):
    return f'{{"prompt": {prompt}, "answer": {answer}}}'.encode()


GOOD = row()
DATASETS = [
    (b"\n \n\n", "no rows"),
    (GOOD + b'\n{"prompt": "\xff", "answer": "1"}', "line 2: not JSON"),
    ('{"prompt": "a", "answer": "1"}'.encode("utf-16"), "line 1: not JSON"),
    (GOOD + b"\n3", "line 2: must be a JSON object, got int"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1: not JSON"),
    (
        row('[{"role": "user", "content": [{"text": "a"}]}]'),
        "row 1: message 1 of the prompt: content must be text, got [",
    ),
    (row('"say \\ud800"'), "row 1: the prompt is not valid Unicode"),
    (row(answer="[1]"), "row 1: data.answer_column=answer is empty, or neither text nor a number"),
    (row(answer="NaN"), "row 1: data.answer_column=answer is empty, or neither text nor a number"),
    (b'{"prompt": "a"}', "data.answer_column=answer: "),
    (row(f'"{"one two " * 1_300_000}"'), "row 1: the prompt has"),
]


@pytest.mark.parametrize(("source", "message"), DATASETS, ids=range(len(DATASETS)))
def test_malformed_datasets(refused, write_config, tmp_path, source, message):
    config = write_config(reward={"functions": ["math"]})
    (tmp_path / "prompts.jsonl").write_bytes(source)
    assert message in refused(config)


def lower_rank(weights):
    weights.update(
        {name: weight[:4].contiguous() for name, weight in weights.items() if "lora_A" in name}
    )


FORMATS = {
    ".json": (
        lambda path: json.loads(path.read_text("utf-8")),
        lambda value, path: path.write_text(json.dumps(value)),
    ),
    ".safetensors": (load_file, partial(save_file, metadata={"format": "pt"})),
    ".pt": (torch.load, torch.save),
}


def edit(name: str, change):
    """A function that changes what a file of a folder holds."""
    load, save = FORMATS[Path(name).suffix]

    def edited(folder: Path) -> None:
        value = load(folder / name)
        change(value)
        save(value, folder / name)

    return edited


def write(name: str, text: str):
    return lambda folder: (folder / name).write_text(text, encoding="latin-1")


def nest(**decoder):
    """A Gemma 3 that reads images, whose decoder has a config of its own."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 260}
    text = {"model_type": "gemma3_text"} | heads | size | decoder
    return write("config.json", json.dumps({"model_type": "gemma3", "text_config": text}))


NO_MODEL = "not a causal language model"
OWN_CODE = {
    "model_type": "evil",
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
}
REACHES_OUT = "{{ messages.__class__.__mro__[1].__subclasses__()[0]('x').system('true') }}"
WEIGHTS, LAYER = "model.safetensors", "model.layers.1.mlp.up_proj.weight"
MODELS = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no language model": (edit("config.json", lambda c: c.update(model_type="vit")), NO_MODEL),
    "code of its own": (edit("config.json", lambda c: c.update(OWN_CODE)), NO_MODEL),
    "logits capped in the decoder's own config": (
        nest(final_logit_softcapping=30.0),
        "(final_logit_softcapping)",
    ),
    "a head that scales its logits": (
        edit("config.json", lambda c: c.update(lm_head_multiplier=0.04)),
        "(lm_head_mult",
    ),
    "a short context there": (
        nest(final_logit_softcapping=None, max_position_embeddings=32),
        "holds 32 tokens, but",
    ),
    "no tokenizer": (lambda m: [path.unlink() for path in m.glob("*token*")], "has no tokenizer"),
    "a tokenizer cut off": (write("tokenizer.json", '{"version'), NO_MODEL),
    "a template that reaches out": (
        write("chat_template.jinja", REACHES_OUT),
        "the model's chat template refuses",
    ),
    "weights that are a pickle": (write(WEIGHTS, "\x80\x04\x95cos\nsystem\n"), NO_MODEL),
    "a weight that is missing": (
        edit(WEIGHTS, lambda w: w.pop(LAYER)),
        f"its weights lack {LAYER}",
    ),
    "a weight of another shape": (
        edit(WEIGHTS, lambda w: w.update({LAYER: torch.zeros(3, 3)})),
        NO_MODEL,
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_malformed_models(refused, write_config, tiny_model, tmp_path, case):
    change, message = MODELS[case]
    shutil.copytree(tiny_model, tmp_path / "model")
    change(tmp_path / "model")
    assert message in refused(write_config(), f"model={tmp_path / 'model'}")


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """A config, and the folder of its run."""
    folder = tmp_path_factory.mktemp("finished")
    tree = {"model": str(tiny_model), "output_dir": str(folder / "run"), "dtype": "float32"}
    sentence = "stapo_lite.extras.quickstart.one_sentence"
    tree |= {
        "data": {"source": f"{sentence}:prompts", "max_prompt_length": 160},
        "objective": {"beta": 0.1},
    }
    tree["reward"] = {"functions": [f"{sentence}:reward"]}
    tree["rollout"] = {"engine": "transformers", "num_generations": 2, "max_completion_length": 4}
    tree["train"] = {"max_steps": 1, "batch_size": 1, "mini_batch_size": 1}
    run(tree)
    write_yaml(folder / "config.yaml", tree)
    return folder


NO_STATE = "state.json is not that of a checkpoint"
CHECKPOINTS = {
    "no progress": (edit("state.json", lambda s: s.pop("progress")), NO_STATE),
    "a negative number": (
        edit("state.json", lambda s: s["progress"].update(halvings=-1)),
        NO_STATE,
    ),
    "progress of another version": (
        edit("state.json", lambda s: s["progress"].update(epoch=1)),
        NO_STATE,
    ),
    "a list as state": (write("state.json", "[]"), "state.json: must be a JSON object, got list"),
    "metrics that are lists": (write("../metrics.jsonl", "[1]\n"), "line 1: must be a JSON object"),
    "an adapter of another rank": (
        edit("adapter_model.safetensors", lower_rank),
        "checkpoint-1: the adapter does not fit the model (",
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_malformed_checkpoints(refused, finished, tmp_path, case):
    change, message = CHECKPOINTS[case]
    shutil.copytree(finished / "run", tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoint-1"
    change(checkpoint)
    arguments = (f"output_dir={tmp_path / 'run'}", "train.max_steps=2", "--resume")
    assert message in refused(finished / "config.yaml", *arguments)


def test_a_resumed_run_that_cannot_go_on_changes_nothing(refused, finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    arguments = (finished / "config.yaml", f"output_dir={tmp_path / 'run'}", "--resume")
    assert "no such file" in refused(*arguments, "data.source=nowhere.jsonl")
    (tmp_path / "run/checkpoint-1/state.json").write_text("{", encoding="utf-8")
    assert "holds only damaged checkpoints" in refused(*arguments)


# Fuzzing: a config or an InputError of one line, whatever is given.

cached_tokenizer = cache(AutoTokenizer.from_pretrained)
checks = [HealthCheck.function_scoped_fixture]
quick = settings(
    deadline=None, max_examples=100, derandomize=True, database=None, suppress_health_check=checks
)
KEYS = st.sampled_from(
    [*Config.model_fields, "max_steps", "r", "s2t", "tau_p", "", "a.b", 3, None, True]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.dates()
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
LINES = VALUES.map(lambda value: json.dumps(value, default=str, skipkeys=True))
MESSAGES = st.fixed_dictionaries({"role": st.text(max_size=4) | st.just("user"), "content": VALUES})
YAML = st.text(alphabet="model:[]{}-&*!#'\"\n \t1.a", max_size=60).map(str.encode)
KNOWN = st.sampled_from([*flatten(Config(**MINIMAL).model_dump())])


def accepted_or_one_line(load, *arguments) -> None:
    message = ""
    try:
        load(*arguments)
    except InputError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1500


@quick
@given(
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.booleans(),
    KNOWN | st.text(max_size=8),
    VALUES.map(repr),
)
def test_any_tree_is_a_config_or_one_line(tree, minimal, key, value):
    for load, complete in (
        (load_config, MINIMAL),
        (load_eval_config, {"model": "m", "output_dir": "o"}),
    ):
        accepted_or_one_line(load, (complete if minimal else {}) | tree)
    accepted_or_one_line(load_config, MINIMAL, [f"{key}={value}"])


@quick
@given(
    source=st.binary(max_size=60)
    | YAML
    | st.lists(LINES, max_size=3).map("\n".join).map(str.encode)
)
def test_any_file_is_a_config_or_a_dataset_or_one_line(tmp_path, source):
    (tmp_path / "file").write_bytes(source)
    for load in (load_config, read_jsonl):
        accepted_or_one_line(load, tmp_path / "file")


MATHS = r"\boxed{ } { $ $$ \frac #### \text{ \left( 12 - . , e-5 ** \ ½ answer: (A) ^ _ \begin{pmatrix} & %"  # noqa: E501
PIECES = st.sampled_from(["\n", "\ud800", "the answer is", *MATHS.split()])


@quick
@given(
    text=st.text(max_size=80) | st.lists(PIECES, max_size=40).map("".join), finished=st.booleans()
)
def test_any_response_has_a_final_answer_or_none(text, finished):
    assert isinstance(final_answer(text, finished), str | None)


@quick
@given(prompt=VALUES | st.lists(MESSAGES, max_size=3), answer=VALUES)
def test_any_row_is_a_prompt_or_one_line(tiny_model, prompt, answer):
    rows, tokenizer = [{"prompt": prompt, "answer": answer}], cached_tokenizer(tiny_model)
    accepted_or_one_line(
        Prompts, rows, tokenizer, Data(source="d.jsonl", max_prompt_length=100), True
    )
