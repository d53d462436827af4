"""Rollouts from real vLLM servers: the engines' protocol over HTTP, adapters, lag, and servers that fail."""

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from conftest import ROOT, SAMPLING, in_two_processes, run, same_metrics
from test_rollout import (  # noqa: F401
    DECODING,
    LONG,
    PROMPTS,
    VERSION,
    gap,
    generate,
    test_a_stream_that_is_left_early_leaves_nothing_behind,
    test_draws_follow_from_the_seed,
    test_each_sample_follows_from_its_own_seed,
    test_groups_follow_the_protocol,
    test_log_probabilities_agree_with_the_trainer,
    test_more_prompt_tokens_than_fit_into_one_pass,
    test_streamed_samples_come_from_the_nucleus,
    version,
)

from stapo_lite.config import InputError, Rollout, RunError, load_config
from stapo_lite.rollout import server_engine
from stapo_lite.rollout.serve import server_arguments
from stapo_lite.rollout.server_engine import ServerEngine
from stapo_lite.tracking import read_metrics

pytest.importorskip("vllm", reason="vLLM is not installed")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serve(model, folder):
    """A server as a user starts it; gives its address and its process group."""
    config = {"model": str(model), "output_dir": "unused", "dtype": "float32", "lora": {"r": 8}}
    config["data"] = {"max_prompt_length": 388}
    config["rollout"] = {"max_completion_length": SAMPLING.max_completion_length, "max_lag": 2, "max_num_seqs": 16}
    config["rollout"] |= {"kv_cache_gb": 0.125, "engine": "server"}
    (folder / "server.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "stapo_lite.rollout.serve", str(folder / "server.yaml"), "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", server.pid
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    with serve(tiny_model, tmp_path_factory.mktemp("server")) as (url, _):
        with connected(url):  # which waits for it
            pass
        yield url


@contextmanager
def connected(*urls, sampling=SAMPLING, **changes):
    options = {"engine": "server", "servers": urls, "max_num_seqs": 16, "max_restarts": 2, "server_timeout": 120}
    engine = ServerEngine("any", "float32", sampling, Rollout(**options | changes), Accelerator(cpu=True))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def connection(server):
    with connected(server) as engine:
        yield engine


@pytest.fixture
def engine(connection):
    return connection


def ask(url, path, method="GET", key=None, data=None):
    """Status and text of a request's answer."""
    headers = {"Authorization": f"Bearer {key or server_engine.api_key()}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers, method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def adapters(url):
    return {m["id"] for m in json.loads(ask(url, "/v1/models")[1])["data"] if m["parent"]}


def tokens(groups):
    return [[c.token_ids for c in group] for group in groups]


def test_a_new_version_does_not_see_the_cache_of_the_one_before(engine, make_policy, version):  # noqa: F811
    for seed in (1, 2):
        policy = make_policy(adapter_seed=seed)
        engine.publish(policy, version())
        assert gap(policy, generate(engine, LONG)).max() < 1e-4


@pytest.mark.parametrize("lag", [0, 2])
def test_versions_are_loaded_as_long_as_they_have_requests(server, make_policy, lag):
    before, policy = adapters(server), make_policy()
    with connected(server, max_lag=lag) as engine:
        for version in (1, 2, 3, 4):
            engine.publish(policy, version)
        names = adapters(server) - before
        assert {int(name.rpartition("-v")[2]) for name in names} == set(range(4 - lag, 5))
    assert adapters(server) == before


def test_adapters_over_a_shared_folder(server, make_policy, tmp_path):
    policy = make_policy()
    with connected(server, shared_folder=str(tmp_path)) as engine:
        for version in (1, 2):
            engine.publish(policy, version)
            (folder,) = tmp_path.iterdir()
            assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        assert gap(policy, generate(engine, PROMPTS)).max() < 1e-4
    assert not list(tmp_path.iterdir())


def test_completions_are_sampled_ahead_by_the_version_of_then(server, make_policy):
    policies = {step: make_policy(adapter_seed=step) for step in (1, 2, 3)}
    batches = [([PROMPTS[i % 3]] * 6, [1000 * i + 4 * k for k in range(6)]) for i in range(3)]
    with connected(server, max_lag=1, max_num_seqs=8) as engine:
        sampled = []
        for step, policy in policies.items():
            engine.publish(policy, step)
            for batch in batches[step - 1 : step + 1]:
                engine.prefetch(*batch)
            sampled.append(engine.generate(*batches[step - 1]))
    for step, groups in zip(policies, sampled, strict=True):
        by_version = {}
        for completion in itertools.chain(*groups):
            by_version.setdefault(completion.adapter_version, []).append(completion)
        assert max(1, step - 1) in by_version  # what was sent before the step began
        assert by_version.keys() <= {max(1, step - 1), step}
        for sampler, completions in by_version.items():
            assert gap(policies[sampler], [completions]).max() < 1e-4
            assert gap(policies[sampler % 3 + 1], [completions]).mean() > 1e-2


def test_who_has_no_key_gets_nothing(server, monkeypatch):
    upload = "/v1/adapters/mine/adapter_config.json"
    assert ask(server, upload, "PUT", key="guess", data=b"{}")[0] == 401
    for path in ("/v1/models", "/invocations", "/adapters", "/tokenize", "/metrics"):
        assert ask(server, path, "POST", key="guess", data=b"{}")[0] == 401
    assert ask(server, "/health", key="guess")[0] == 200
    for path in ("/v1/adapters/mine/evil.py", "/v1/adapters/../adapter_config.json", "/v1/adapters/%2e%2e%2fa"):
        assert ask(server, path, "PUT", data=b"{}")[0] in (404, 405)
    status, folder = ask(server, upload, "PUT", data=b"{}")
    assert status == 200
    assert (Path(folder) / "adapter_config.json").read_bytes() == b"{}"
    assert ask(server, upload, "GET")[0] == 405
    assert ask(server, "/v1/adapters/mine", "DELETE")[0] == 200
    assert not Path(folder).exists()
    monkeypatch.setenv("VLLM_API_KEY", "guess")
    with pytest.raises(InputError, match="refuses the API key: set VLLM_API_KEY"), connected(server):
        pass


def test_the_key_is_made_once_and_readable_by_its_user_only(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(server_engine, "KEY_FILE", tmp_path / "cache" / "key")
    key = server_engine.api_key()
    assert len(key) > 40
    assert server_engine.api_key() == key
    assert (tmp_path / "cache" / "key").stat().st_mode & 0o077 == 0
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setenv("VLLM_API_KEY", "given")
    assert server_engine.api_key() == "given"
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert server_engine.api_key() == key


def test_servers_that_cannot_serve_the_run(server):
    with pytest.raises(InputError, match="serves sequences of 400 tokens, but .* = 500"):
        connected(server, sampling=replace(SAMPLING, max_prompt_length=488)).__enter__()
    with pytest.raises(InputError, match=r"http://127.0.0.1:9 did not come up within 0.2 s"):
        connected(server, "http://127.0.0.1:9", server_timeout=0.2).__enter__()


@pytest.mark.slow
def test_log_probabilities_without_the_temperature_are_refused(tiny_model):
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--model", str(tiny_model)]
    environment = os.environ | {"VLLM_API_KEY": server_engine.api_key()}
    options = ["--enforce-eager", "--max-model-len", "400", "--kv-cache-memory-bytes", str(1 << 27)]
    plain = subprocess.Popen([*command, *options], env=environment, start_new_session=True)
    try:
        with pytest.raises(InputError, match="without the temperature: start it with --logprobs-mode"):
            connected(f"http://127.0.0.1:{port}").__enter__()
    finally:
        os.killpg(plain.pid, signal.SIGKILL)


@contextmanager
def proxy(url, refuse):
    """Passes connections on to a server, but for those that begin with a refused line."""
    host, port = url.removeprefix("http://").split(":")

    async def pump(reader, writer):
        while chunk := await reader.read(65536):
            writer.write(chunk)
        writer.close()

    async def connect(reader, writer):
        beginning = await reader.read(65536)
        if refuse(beginning):
            writer.transport.abort()
            return
        back, forth = await asyncio.open_connection(host, port)
        forth.write(beginning)
        await asyncio.gather(pump(reader, forth), pump(back, writer), return_exceptions=True)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(connect, "127.0.0.1", 0), loop).result()
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)


def test_requests_that_fail_are_repeated_a_few_times(server, make_policy):
    policy, asked, broken = make_policy(), [], []

    def refuse(beginning):
        if b"POST /v1/completions" not in beginning:
            return False
        asked.append(beginning)
        return bool(broken) or 1 < len(asked) <= 5

    with connected(server) as engine, proxy(server, refuse) as url, connected(url) as shaky:
        for each in (engine, shaky):
            each.publish(policy, 1)
        asked.clear()
        assert tokens(generate(shaky, PROMPTS)) == tokens(generate(engine, PROMPTS))
        assert len(asked) == 12 + 4
        broken.append(True)
        asked.clear()
        with pytest.raises(RunError, match="a request failed 3 times"):
            shaky.generate(PROMPTS[:1], [0])


def test_a_lost_server_is_dropped_and_its_work_moved(server, tiny_model, make_policy, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(server_engine, "HEALTH_INTERVAL", 0.2)
    monkeypatch.setattr(server_engine, "HEALTH_TIMEOUT", 2.0)
    policy, prompts = make_policy(), PROMPTS * 12
    with serve(tiny_model, tmp_path) as (other, group), connected(server, other) as engine, connected(other) as alone:

        def publish(version):
            engine.publish(policy, version)
            return [url for url in (server, other) if any(name.endswith(f"-v{version}") for name in adapters(url))]

        assert publish(1) == [server, other]
        expected = tokens(generate(engine, prompts))
        alone.publish(policy, 11)

        # One that hangs is noticed, and takes part again once it answers.
        os.killpg(group, signal.SIGSTOP)
        assert tokens(generate(engine, prompts)) == expected
        assert re.search(rf"going on without {other} \(it does not answer\); [1-9]\d* completions move", caplog.text)
        engine.publish(policy, 2)  # which does not wait for it
        os.killpg(group, signal.SIGCONT)
        assert ask(other, "/health")[0] == 200
        assert publish(3) == [server, other]
        with pytest.raises(RunError, match="none is left"):  # nor will one be before the next version
            generate(alone, PROMPTS)
        alone.publish(policy, 12)

        # One that dies in the middle of a batch.
        caplog.clear()
        prompts, seeds = PROMPTS * 60, list(range(180))  # more than is done before it dies
        expected = {i: c.token_ids for i, c in engine.stream(prompts, seeds, DECODING)}
        waiting, stream = alone.stream(prompts, seeds, DECODING), engine.stream(prompts, seeds, DECODING)
        _, first = next(waiting), next(stream)
        os.killpg(group, signal.SIGKILL)
        assert {i: c.token_ids for i, c in [first, *stream]} == expected
        assert re.search(f"going on without {other} .*; [1-9]\\d* completions move", caplog.text)
        with pytest.raises(RunError, match="none is left"):
            list(waiting)
        engine.publish(policy, 4)
        assert {c.adapter_version for c in itertools.chain(*generate(engine, PROMPTS))} == {4}
        with pytest.raises(RunError, match="none of them could load the adapter"):
            alone.publish(policy, 13)


@pytest.fixture
def served(server, write_config):
    """A run whose completions a server samples."""

    def write(name, *, max_lag=0, **changes):
        rollout = {"engine": "server", "servers": [server], "max_lag": max_lag, "num_generations": 4}
        rollout |= {"max_completion_length": 8}
        return write_config(rollout=rollout, output_dir=name, train__learning_rate=1e-4, train__max_steps=3, **changes)

    return write


def test_two_processes_make_the_same_run_as_one(served, tmp_path):
    """Where the base is spread over both, and an adapter that one of them publishes reaches the other."""
    launcher = ["--config_file", str(ROOT / "configs" / "accelerate" / "fsdp2.yaml")]
    in_two_processes(served(str(tmp_path / "two")), tmp_path, accelerate=launcher)
    one = run(served(str(tmp_path / "one")))
    assert all(m["updates"] == 2 and m["silenced_share"] > 0 for m in one)
    assert all(m["lag_max"] == 0 for m in one)
    same_metrics(read_metrics(tmp_path / "two"), one)


def test_a_run_that_samples_ahead(served, tmp_path):
    metrics = run(served(str(tmp_path / "ahead"), max_lag=2))
    assert [m["lag_max"] for m in metrics] == [0, 1, 2]
    assert all(m["lag_mean"] <= m["lag_max"] for m in metrics)
    assert metrics[1]["sampler_gap_mean"] > 1e-5 > metrics[0]["sampler_gap_mean"]  # the adapters' difference, corrected
    assert metrics[0]["updates"] == 2


def test_what_a_server_on_a_card_is_started_with(write_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = server_arguments(load_config(write_config()), "127.0.0.1", 8000)
    assert json.loads(arguments[arguments.index("--hf-overrides") + 1]) == {"head_dtype": "float32"}
    assert arguments[arguments.index("--max-num-batched-tokens") + 1] == "8192"
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
