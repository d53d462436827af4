"""Rollouts from a real vLLM server: the engines' protocol, adapters, lag, and servers that fail."""

import itertools
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import openai
import pytest
import torch
from accelerate import Accelerator
from engine_cases import *  # noqa: F403  # the tests of every engine, for servers
from engine_cases import drawn_ids
from helpers import (
    MINIMAL,
    PROMPTS,
    SAMPLING,
    gap,
    generate,
    in_two_processes,
    objective,
    run,
    same_metrics,
    steps,
)

from stapo_lite.config import Rollout, load_config
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.servers import engine as server_engine
from stapo_lite.extras.servers import serve
from stapo_lite.extras.servers.engine import ServerEngine, api_key
from stapo_lite.extras.teacher import ServerTeacher
from stapo_lite.loop_thread import submit
from stapo_lite.method.tokens import pack
from stapo_lite.rollout.vllm_options import engine_arguments
from stapo_lite.training.folder import read_metrics
from stapo_lite.types import Completion

pytest.importorskip("vllm", reason="vLLM is not installed")


def connected(folder, *urls, sampling=SAMPLING, **changes):
    options = Rollout(**{"engine": "server", "servers": urls, "max_num_seqs": 16} | changes)
    return closing(ServerEngine("float32", sampling, options, folder, Accelerator(cpu=True)))


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """The address of one that runs as a user starts it."""
    port = 20_000 + os.getpid() % 10_000  # below those that the kernel gives away
    keys = f"model={tiny_model} dtype=float32 lora.r=8 data.max_prompt_length=388 rollout.max_lag=2"
    keys += " rollout.max_completion_length=12 rollout.max_num_seqs=16"
    command = f"-m stapo_lite serve configs/quickstart.yaml --port {port} {keys}".split()
    with subprocess.Popen([sys.executable, *command], start_new_session=True) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            with connected(tmp_path_factory.mktemp("server"), url):  # which waits for it
                yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def engine(server, tmp_path_factory):
    with connected(tmp_path_factory.mktemp("adapters"), server) as engine:
        yield engine


@pytest.fixture
def lost(monkeypatch):
    """Requests to addresses that hold one of these words find no server."""
    words, send = [], openai.DefaultAsyncHttpxClient.send

    async def losing(client, request, **options):
        if any(word in str(request.url) for word in words):
            request.url = request.url.copy_with(port=9)  # where nobody listens
        return await send(client, request, **options)

    monkeypatch.setattr(openai.DefaultAsyncHttpxClient, "send", losing)
    monkeypatch.setattr(server_engine, "MAX_RETRIES", 1)
    return words


def adapters(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key())
    return {model.id for model in client.models.list() if model.parent}


@pytest.mark.parametrize("lag", [0, 2])
def test_versions_are_loaded_as_long_as_they_have_requests(server, make_policy, tmp_path, lag):
    before, policy, left = adapters(server), make_policy(), range(4 - lag, 5)
    (tmp_path / ".adapters-0123cdef" / "v9").mkdir(parents=True)  # by a run that was killed
    with connected(tmp_path, server, max_lag=lag) as engine:
        for version in (1, 2, 3, 4):
            engine.publish(policy, version)
        names = adapters(server) - before
        assert {int(name.rpartition("-v")[2]) for name in names} == set(left)
        assert {path.name for path in tmp_path.glob("*/*")} == {f"v{version}" for version in left}
        assert gap(policy, generate(engine, PROMPTS)).max() < 1e-4
    assert not list(tmp_path.iterdir())
    with connected(tmp_path, server) as resumed:
        resumed.publish(policy, 4)  # under another name
        assert len(adapters(server) - before - names) == 1


def test_completions_sampled_ahead_have_the_older_version(server, make_policy, tmp_path):
    policies = {step: make_policy(adapter_seed=step) for step in (1, 2, 3)}
    batches = [([PROMPTS[i % 3]] * 6, [1000 * i + 4 * k for k in range(6)]) for i in range(3)]
    sampled = {}
    with connected(tmp_path, server, max_lag=1, max_num_seqs=8) as engine:
        for step, policy in policies.items():
            engine.publish(policy, step)
            for batch in batches[step - 1 : step + 1]:
                engine.prefetch(*batch)
            sampled[step] = [*itertools.chain(*engine.generate(*batches[step - 1]))]
    for step, completions in sampled.items():
        versions = {c.adapter_version for c in completions}
        assert max(1, step - 1) in versions  # what was sent before the step began
        assert versions <= {max(1, step - 1), step}
        for sampler in versions:
            ours = [c for c in completions if c.adapter_version == sampler]
            assert gap(policies[sampler], [ours]).max() < 1e-4
            assert gap(policies[sampler % 3 + 1], [ours]).mean() > 1e-2


def test_the_key_is_made_once_and_readable_by_its_user_only(tmp_path, monkeypatch):
    monkeypatch.setattr(server_engine, "KEY_FILE", tmp_path / "cache" / "key")
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert len(key := api_key()) > 40
    assert api_key() == key
    assert (tmp_path / "cache" / "key").stat().st_mode & 0o077 == 0


def test_servers_that_cannot_serve_the_run(server, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="serves 400 tokens, 500 are needed"):
        connected(tmp_path, server, sampling=replace(SAMPLING, max_model_len=500))
    monkeypatch.setattr(server_engine, "START_TIMEOUT", 0.2)
    with pytest.raises(InputError, match=r"rollout.servers: http://127.0.0.1:9/v1/ cannot be used"):
        connected(tmp_path, "http://127.0.0.1:9")
    monkeypatch.setenv("VLLM_API_KEY", "guess")
    with pytest.raises(InputError, match="cannot be used .*401"):
        connected(tmp_path, server)


def test_a_server_is_a_teacher(server, make_policy):
    """Its scores are those of the base at a temperature of 1."""
    policy, texts = make_policy(scale=0.0, rollout__temperature=1.0), ([5, 6, 7], [8], [9, 10])
    pairs = zip(PROMPTS, texts, strict=True)
    completions = [Completion(prompt, ids, [0.0] * len(ids), False, 1) for prompt, ids in pairs]
    teacher = ServerTeacher(1.0, server, api_key())
    found = teacher.logprobs(SimpleNamespace(), pack(completions, "cpu", objective()))
    torch.testing.assert_close(found, policy.statistics(completions).logprobs, atol=1e-4, rtol=1e-4)
    unknown = Completion(PROMPTS[0], [10**6], [0.0], False, 1)
    with pytest.raises(RunError, match="objective.teacher_server: does not score"):
        teacher.logprobs(SimpleNamespace(), pack([unknown], "cpu", objective()))


def test_a_teacher_must_have_the_students_vocabulary_and_room(server, tokenizer):
    teacher = ServerTeacher(1.0, server, api_key())
    keys = {"data.max_prompt_length": 387, "rollout.max_completion_length": 12}
    fits, longer = (load_config(MINIMAL, overrides) for overrides in (keys, {}))
    run = SimpleNamespace(tokenizer=tokenizer, prompts=PROMPTS, config=fits)
    teacher.on_train_begin(run)
    run.config = longer
    with pytest.raises(InputError, match="objective.teacher_server: serves 400 tokens, 3073 need"):
        teacher.on_train_begin(run)
    run.tokenizer = Mock(decode=tokenizer.decode, return_value=Mock(input_ids=[5, 6]))
    with pytest.raises(InputError, match="its model has another vocabulary"):
        teacher.on_train_begin(run)


def test_a_lost_server_holds_up_no_step_and_rejoins(
    server, lost, make_policy, tmp_path, watch, caplog
):
    """Waiting for it at each request had made 0.3 s of a step 14 to 55."""
    policy, prompts, seeds, asked = make_policy(), PROMPTS * 4, range(12), []
    other = server.replace("127.0.0.1", "localhost")
    with connected(tmp_path, f"{server}/", other) as engine:
        watch(openai.DefaultAsyncHttpxClient, "send", lambda _, __, sent: asked.append(sent.url))

        def to_the_other():
            urls = [url.path.rpartition("/")[2] for url in asked if "localhost" in str(url)]
            asked.clear()
            return urls

        engine.publish(policy, 1)
        lost.append(other)
        expected = drawn_ids(engine, prompts, seeds)
        assert "completions" in to_the_other()
        for version in (2, 3):
            engine.publish(policy, version)
            assert drawn_ids(engine, prompts, seeds) == expected
            assert to_the_other() == ["load_lora_adapter", "unload_lora_adapter"]
            assert caplog.text.count("is left out of this step") == 1  # once
        lost.clear()
        engine.publish(policy, 4)
        assert drawn_ids(engine, prompts, seeds) == expected
        assert to_the_other().count("completions") > 1


def test_no_proxy_gets_the_key(server, make_policy, tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(
            name, "socks5://127.0.0.1:9" if "all" in name.lower() else "http://127.0.0.1:9"
        )
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with connected(tmp_path, server) as engine:
        engine.publish(make_policy(), 1)
        assert drawn_ids(engine, PROMPTS, range(3))
    assert ServerTeacher(1.0, server, api_key())


def test_requests_of_a_lost_server_go_to_the_next(server, lost, make_policy, tmp_path, caplog):
    policy, prompts, seeds = make_policy(), PROMPTS * 4, range(12)
    other = server.replace("127.0.0.1", "localhost")  # another server to a client
    with connected(tmp_path, server, other) as engine:
        engine.publish(policy, 1)
        expected = drawn_ids(engine, prompts, seeds)
        lost.append(f"{other}/v1/completions")
        assert drawn_ids(engine, prompts, seeds) == expected
        lost.append(other)
        engine.publish(policy, 2)  # one is enough
        assert {c.adapter_version for c in itertools.chain(*generate(engine, PROMPTS))} == {2}
        submit(engine._post("unload", 2), "rollouts").result()  # as if it had been restarted
        lost.clear()
        engine.publish(policy, 3)
        assert drawn_ids(engine, prompts, seeds) == expected
        (unfinished,) = [c for c in engine._servers if "localhost" in str(c.base_url)]
        cut = SimpleNamespace(choices=[SimpleNamespace(finish_reason="abort", token_ids=[])])
        unfinished.completions.create = AsyncMock(return_value=cut)  # it is being stopped
        assert drawn_ids(engine, prompts, seeds) == expected
        assert f"{unfinished.base_url} is left out of this step (aborted)" in caplog.messages
        del unfinished.completions.create
        lost.extend((server, other))
        with pytest.raises(RunError, match="all have failed .Connection error.*with --resume"):
            drawn_ids(engine, prompts, seeds)
        assert f"{server}/v1/ is left out of this step (Connection error.)" in caplog.messages
        with pytest.raises(RunError, match="no adapter loaded"):
            engine.publish(policy, 4)


@pytest.fixture
def served(engine, server, write_config, tmp_path):
    def write(name, max_lag=0):
        keys = {"rollout__engine": "server", "rollout__servers": [server], "train__max_steps": 3}
        keys |= {"rollout__max_lag": max_lag, "train__learning_rate": 1e-4}
        return write_config(output_dir=str(tmp_path / name), **keys)

    return write


def test_a_run_whose_servers_fail_goes_on_with_resume(served, lost):
    whole, config = run(served("whole")), served("halves")
    training = steps(config)
    first = next(training)
    lost.append("/v1/completions")
    with pytest.raises(RunError, match="all have failed .Connection error.*with --resume"):
        next(training)
    lost.clear()
    same_metrics([first, *run(config, resume=True)], whole)


@pytest.mark.slow
def test_two_processes_make_the_same_run_as_one(served, tmp_path):
    in_two_processes(served("two"), tmp_path)
    one = run(served("one"))
    assert all(m["updates"] == 2 and m["silenced_share"] > 0 == m["lag_mean"] for m in one)
    same_metrics(read_metrics(tmp_path / "two"), one)


def test_a_run_that_samples_ahead(served):
    metrics = run(served("ahead", max_lag=2))
    assert all(0 <= m["lag_mean"] <= lag for lag, m in enumerate(metrics))
    assert metrics[1]["lag_mean"] > 0
    gaps = [m["sampler_gap_mean"] for m in metrics]
    assert gaps[1] > 1e-5 > gaps[0]  # the difference of the adapters, which is corrected
    assert metrics[0]["updates"] == 2


def test_a_server_gets_the_same_arguments_as_an_engine_in_the_process(write_config):
    """As vLLM's own parser reads them, for a card."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = {"enable_prefix_caching": False, "tensor_parallel_size": 2, "enforce_eager": True}
    given["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2}
    c = load_config(write_config(rollout={"engine": "server", "max_lag": 3, "vllm": given}))
    flags = serve.server_arguments(c, "127.0.0.1", 8000, on_cpu=False)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed, rest = parser.parse_known_args(flags)
    assert rest == ["--host", "127.0.0.1", "--port", "8000", "--uvicorn-log-level", "warning"]
    settings = (c.model, c.dtype, c.max_sequence_length, c.rollout, c.lora)
    expected = engine_arguments(*settings, max_loras=4, on_cpu=False)
    del expected["quantization"]  # None
    compilation = expected.pop("compilation_config")
    assert {name: getattr(parsed.compilation_config, name) for name in compilation} == compilation
    assert {name: getattr(parsed, name) for name in expected} == expected
    assert expected.items() >= given.items()


def test_processes_share_what_a_server_takes_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(ServerEngine, "_connect", AsyncMock())
    options = Rollout(engine="server", servers=["http://a", "http://b"], max_num_seqs=16)
    one, three = (SimpleNamespace(num_processes=n, is_main_process=True) for n in (1, 3))
    for accelerator, slots in ((one, 32), (three, 10)):  # of the 16, five for each
        with closing(ServerEngine("float32", SAMPLING, options, tmp_path, accelerator)) as engine:
            assert engine._slots._value == slots
