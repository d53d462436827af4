"""Malformed configs, data and models: one line, status 2, nothing overwritten."""

import json
import shutil

import pytest
from helpers import MINIMAL, command, contents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stapo_lite.config import Config, Data, flatten, load_config, load_eval_config
from stapo_lite.data.prompts import make_prompts
from stapo_lite.errors import InputError
from stapo_lite.files import read_jsonl


def write(name, text):
    return lambda folder: (folder / name).write_text(text, encoding="latin-1")


def lose_a_layer(folder):
    weights = load_file(folder / WEIGHTS)
    del weights[LAYER]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


ROW = '{"prompt": "say one", "answer": "1"}\n'
OWN_CODE = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
REACHES_OUT = "{{ messages.__class__.__mro__[1].__subclasses__()[0]('x').system('true') }}"
WEIGHTS, LAYER = "model/model.safetensors", "model.layers.1.mlp.up_proj.weight"
NO_YAML, NO_MODEL = "cannot be read as YAML", "not a causal language model"
CASES = [
    (write("config.yaml", ""), "must be a YAML mapping"),
    (write("config.yaml", "model: \xff\xfe\xfa"), NO_YAML),
    (write("config.yaml", "model: !!python/object/apply:os.system ['true']"), NO_YAML),
    (write("config.yaml", "model: a\nmodel: b\noutput_dir: o"), "the key 'model' is given twice"),
    (write("config.yaml", "[" * 5000), NO_YAML),
    (write("config.yaml", "seed: " + "9" * 5000), NO_YAML),
    (write("config.yaml", "model: m\noutput_dir: &a [*a]"), "key 'output_dir'"),
    ("=3", "write it as key.sub=value"),
    ("model.name=3", "model is a value, not a section"),
    ("reward.functions=['__import__(\"os\")']", "use math or package.module"),
    ("output_dir=/dev/null/run", "cannot be written"),
    ("rollout.servers=[localhost:8000]", "rollout.servers"),
    ("data.source=nowhere.jsonl", "no such file"),
    (write("prompts.jsonl", ROW + '{"prompt": "\xff"}'), "line 2: not JSON"),
    (write("prompts.jsonl", ROW + "3"), "line 2: must be a JSON object, got int"),
    (write("prompts.jsonl", '{"prompt": ' + "[" * 100_000), "line 1: not JSON"),
    (write("prompts.jsonl", ROW.replace("one", "\\ud800")), "row 1: the prompt cannot be token"),
    (lambda folder: shutil.rmtree(folder / "model"), NO_MODEL),
    (write("model/config.json", json.dumps(OWN_CODE)), NO_MODEL),
    (lambda f: [path.unlink() for path in f.glob("model/*token*")], "has no tokenizer"),
    (write("model/tokenizer.json", '{"version'), NO_MODEL),
    (write("model/chat_template.jinja", REACHES_OUT), "the model's chat template refuses"),
    (write(WEIGHTS, "\x80\x04\x95cos\nsystem\n"), NO_MODEL),  # a pickle
    (lose_a_layer, f"its weights lack {LAYER}"),
]


@pytest.mark.parametrize(("change", "message"), CASES, ids=range(len(CASES)))
def test_malformed_input(write_config, tiny_model, tmp_path, monkeypatch, capsys, change, message):
    """`change` is an override, or changes a file."""
    config, model = write_config(), shutil.copytree(tiny_model, tmp_path / "model")
    if callable(change):
        change(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    status = command("train", config, f"model={model}", *([] if callable(change) else [change]))
    printed = capsys.readouterr().err
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert (status, len(errors)) == (2, 1), printed[-2000:]
    assert "Traceback" not in printed
    assert message in errors[0]
    assert len(errors[0]) < 1500
    assert contents(tmp_path) == before


# Fuzzing: a config or an InputError of one line, whatever is given.

quick = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
NAMES = [*Config.model_fields, "max_steps", "r", "s2t", "tau_p", "", "a.b", 3, None, True]
KEYS, TEXT = st.sampled_from(NAMES), st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.dates() | st.binary()
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v), max_leaves=8
)
LINES = VALUES.map(lambda value: json.dumps(value, default=str, skipkeys=True))
MESSAGES = st.fixed_dictionaries({"role": TEXT | st.just("user"), "content": VALUES})
YAML = st.text(alphabet="model:[]{}-&*!#'\"\n \t1.a", max_size=60)
EVALUATION = {"model": "m", "output_dir": "o"}
KNOWN = st.sampled_from([*flatten(Config(**MINIMAL).model_dump())])


def accepted_or_one_line(load, *arguments):
    message = ""
    try:
        load(*arguments)
    except InputError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1500


@quick
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.booleans(), KNOWN | TEXT, VALUES.map(repr))
def test_any_tree_is_a_config_or_one_line(tree, minimal, key, value):
    for load, complete in ((load_config, MINIMAL), (load_eval_config, EVALUATION)):
        accepted_or_one_line(load, (complete if minimal else {}) | tree)
    accepted_or_one_line(load_config, MINIMAL, [f"{key}={value}"])


@quick
@given(st.binary(max_size=60) | (YAML | st.lists(LINES, max_size=3).map("\n".join)).map(str.encode))
def test_any_file_is_a_config_or_a_dataset_or_one_line(tmp_path, source):
    (tmp_path / "file").write_bytes(source)
    for load in (load_config, read_jsonl):
        accepted_or_one_line(load, tmp_path / "file")


@quick
@given(prompt=VALUES | st.lists(MESSAGES, max_size=3), answer=VALUES)
def test_any_row_is_a_prompt_or_one_line(tokenizer, prompt, answer):
    rows, data = [{"prompt": prompt, "answer": answer}], Data(source="d", max_prompt_length=100)
    accepted_or_one_line(make_prompts, rows, tokenizer, data, True)
