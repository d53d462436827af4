"""Rollouts from real vLLM servers: the engines' protocol over HTTP, adapters, lag, and servers that
fail."""

import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
from concurrent.futures import wait
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from accelerate import Accelerator
from engine_cases import *  # noqa: F403  # the tests of every engine, for servers
from engine_cases import DECODING, VERSIONS, tokens
from helpers import (
    PROMPTS,
    SAMPLING,
    command,
    gap,
    generate,
    in_two_processes,
    run,
    same_metrics,
    write_yaml,
)
from hub import Hub

from stapo_lite.algorithm.microbatches import pack
from stapo_lite.config import Rollout, load_config
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.servers import engine as server_engine
from stapo_lite.extras.servers import serve
from stapo_lite.extras.servers.engine import ServerEngine
from stapo_lite.extras.teacher import ServerTeacher
from stapo_lite.rollout.vllm_options import engine_arguments
from stapo_lite.training.folder import read_metrics
from stapo_lite.types import Completion

pytest.importorskip("vllm", reason="vLLM is not installed")
httpx = pytest.importorskip("httpx")  # which vLLM brings


def free_port():
    """Below the ports that the kernel gives to whoever asks for any: none of them can take it while
    the server starts."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    pytest.fail("no free port")


@contextmanager
def serving(model, folder):
    """A server as a user starts it; gives its address and its process group."""
    config = {"model": str(model), "output_dir": "unused", "dtype": "float32", "lora": {"r": 8}}
    config["data"] = {"source": "p.jsonl", "max_prompt_length": 388}
    config["rollout"] = {
        "max_completion_length": SAMPLING.max_completion_length,
        "max_lag": 2,
        "max_num_seqs": 16,
    }
    config["rollout"] |= {"vllm": {"kv_cache_memory_bytes": 1 << 27}, "engine": "server"}
    path = write_yaml(folder / "server.yaml", config)
    port = free_port()
    command = [sys.executable, "-m", "stapo_lite", "serve", str(path), "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", server.pid
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def connected(folder, *urls, sampling=SAMPLING, **changes):
    options = Rollout(**{"engine": "server", "servers": urls, "max_num_seqs": 16} | changes)
    return closing(ServerEngine("float32", sampling, options, folder, Accelerator(cpu=True)))


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(tiny_model, folder) as (url, _):
        with connected(folder, url):  # which waits for it
            pass
        yield url


@pytest.fixture(scope="module")
def engine(server, tmp_path_factory):
    with connected(tmp_path_factory.mktemp("adapters"), server) as engine:
        yield engine


def ask(url, path, method="GET", key=None, content=None):
    headers = {"Authorization": f"Bearer {key or server_engine.api_key()}"}
    return httpx.request(method, url + path, headers=headers, json=content, timeout=60)


def adapters(url):
    return {m["id"] for m in ask(url, "/v1/models").json()["data"] if m["parent"]}


def streamed(engine, prompts):
    return {
        i: c.token_ids
        for i, c in engine.stream(prompts, range(len(prompts)), [DECODING] * len(prompts))
    }


@pytest.mark.parametrize("lag", [0, 2])
def test_versions_are_loaded_as_long_as_they_have_requests(server, make_policy, tmp_path, lag):
    before, policy, left = adapters(server), make_policy(), range(4 - lag, 5)
    (tmp_path / "stapo_lite-0123cdef" / "v9").mkdir(
        parents=True
    )  # a run that was killed has left it
    with connected(tmp_path, server, max_lag=lag) as engine:
        for version in (1, 2, 3, 4):
            engine.publish(policy, version)
        assert {int(name.rpartition("-v")[2]) for name in adapters(server) - before} == set(left)
        assert {path.name for path in tmp_path.glob("*/*")} == {f"v{version}" for version in left}
        assert gap(policy, generate(engine, PROMPTS)).max() < 1e-4
    assert adapters(server) == before
    assert not list(tmp_path.iterdir())


def test_completions_sampled_ahead_have_the_older_version(server, make_policy, tmp_path):
    policies = {step: make_policy(adapter_seed=step) for step in (1, 2, 3)}
    batches = [([PROMPTS[i % 3]] * 6, [1000 * i + 4 * k for k in range(6)]) for i in range(3)]
    with connected(tmp_path, server, max_lag=1, max_num_seqs=8) as engine:
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


def test_without_the_key_a_server_does_nothing(engine, server, monkeypatch, tmp_path):
    for path in ("/v1/models", "/v1/load_lora_adapter", "/invocations", "/tokenize", "/metrics"):
        assert ask(server, path, "POST", key="guess", content={}).status_code == 401
    assert ask(server, "/health", key="guess").status_code == 200
    assert ask(server, "/metrics").status_code == 200
    monkeypatch.setenv("VLLM_API_KEY", "guess")
    with pytest.raises(InputError, match="refuses the API key: set VLLM_API_KEY"):
        connected(tmp_path, server)


def test_the_key_is_made_once_and_readable_by_its_user_only(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(server_engine, "KEY_FILE", tmp_path / "cache" / "key")
    key = server_engine.api_key()
    assert len(key) > 40
    assert server_engine.api_key() == key
    assert (tmp_path / "cache" / "key").stat().st_mode & 0o077 == 0
    for given, used in {"given": "given", "": key}.items():
        monkeypatch.setenv("VLLM_API_KEY", given)
        assert server_engine.api_key() == used


def test_connections_are_as_many_as_requests_and_outlive_silence(server, tmp_path, monkeypatch):
    """1024 open files, a usual limit, are fewer than the requests of two servers; routers forget
    silent connections."""
    opened, open_socket = [], server_engine.keep_alive
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))

    def options(address):
        connection = open_socket(address)
        asks = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        opened.append((asks, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)))
        return connection

    monkeypatch.setattr(server_engine, "keep_alive", options)
    with connected(tmp_path, server):
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65_535)
    assert set(opened) == {(1, 60)}


def test_servers_that_cannot_serve_the_run(engine, server, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="serves sequences of 400 tokens, but .* = 500"):
        connected(tmp_path, server, sampling=replace(SAMPLING, max_model_len=500))
    monkeypatch.setattr(server_engine, "START_TIMEOUT", 0.2)
    with pytest.raises(InputError, match=r"http://127.0.0.1:9 did not come up in 0.2 s: start it"):
        connected(tmp_path, server, "http://127.0.0.1:9")


@pytest.mark.parametrize("document", [{"data": []}, {"data": [{"id": "a"}]}, [], {"models": 1}])
def test_other_servers_are_refused(tmp_path, document):
    class Other(Hub):
        def answer(self, *request):
            return 200, document

    url = Other().url
    with pytest.raises(InputError, match=f"rollout.servers: {url} does not say what it serves"):
        connected(tmp_path, url)
    if document != {"data": [{"id": "a"}]}:  # enough for a teacher
        with pytest.raises(RunError, match=f"teacher_server={url}: does not say what it serves"):
            ServerTeacher(1.0, url, "")


def lose_connections(monkeypatch, lost):
    """Those of requests to some addresses."""
    request = aiohttp.ClientSession.request

    def losing(session, method, url, **options):
        if lost(url):
            raise aiohttp.ServerDisconnectedError
        return request(session, method, url, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "request", losing)


def test_a_server_is_a_teacher(server, make_policy, monkeypatch):
    """Its scores are those of the base at a temperature of 1."""
    run, policy = SimpleNamespace(), make_policy(scale=0.0, rollout__temperature=1.0)
    completions = [
        Completion(prompt, ids, [0.0] * len(ids), False, 1)
        for prompt, ids in zip(PROMPTS, ([5, 6, 7], [8], [9, 10, 11, 12]), strict=True)
    ]
    teacher = ServerTeacher(1.0, server, server_engine.api_key())
    found = teacher.logprobs(run, pack(completions, "cpu"))
    torch.testing.assert_close(found, policy.statistics(completions).logprobs, atol=1e-4, rtol=1e-4)
    with pytest.raises(RunError, match="teacher_server=.*: does not score .*Unauthorized"):
        ServerTeacher(1.0, server, "wrong")
    monkeypatch.setattr("stapo_lite.extras.teacher.PAUSE", 0.01)
    with pytest.raises(RunError, match="teacher_server=.*: does not score .*refused"):
        ServerTeacher(1.0, "http://127.0.0.1:1", "any")
    unknown = Completion(PROMPTS[0], [10**6], [0.0], False, 1)
    with pytest.raises(RunError, match="objective.teacher_server=.*: does not score"):
        teacher.logprobs(run, pack([unknown], "cpu"))


@pytest.fixture
def other(server):
    """Another address of the same server: another server to a client."""
    return server.replace("127.0.0.1", "localhost")


def test_requests_that_fail_are_repeated_a_few_times(
    engine, other, make_policy, tmp_path, monkeypatch
):
    policy, asked, broken = make_policy(), [], []
    monkeypatch.setattr(server_engine, "HEALTH_INTERVAL", 0.1)

    def lost(url):
        if url != f"{other}/v1/completions":
            return False
        asked.append(url)
        return bool(broken) or 1 < len(asked) <= 5

    lose_connections(monkeypatch, lost)
    with connected(tmp_path, other) as shaky:
        engine.publish(policy, next(VERSIONS))
        shaky.publish(policy, 1)
        assert tokens(generate(shaky, PROMPTS)) == tokens(generate(engine, PROMPTS))
        assert len(asked) == 12 + 4
        broken.append(True)
        failed = f"a request failed {1 + server_engine.MAX_RETRIES} times"
        with pytest.raises(RunError, match=failed):
            streamed(shaky, PROMPTS[:1])


def test_a_server_that_is_gone_is_dropped_until_it_is_back(
    server, other, make_policy, tmp_path, monkeypatch, caplog
):
    policy, prompts, gone, requests = make_policy(), PROMPTS * 20, [], itertools.count()
    monkeypatch.setattr(server_engine, "HEALTH_INTERVAL", 0.1)
    lose_connections(
        monkeypatch, lambda url: gone and url.startswith(other) and next(requests) >= 5
    )
    with (
        connected(tmp_path / "both", server, other) as both,
        connected(tmp_path / "alone", other) as alone,
    ):
        both.publish(policy, 1)
        alone.publish(policy, 1)
        expected = streamed(both, prompts)
        gone.append(True)  # after five more requests
        assert streamed(both, prompts) == expected
        assert f"going on without {other}" in caplog.text
        with pytest.raises(RunError, match="none is left"):
            streamed(alone, PROMPTS)
        with pytest.raises(RunError, match="none could load the adapter"):
            alone.publish(policy, 2)
        both.publish(policy, 2)
        assert {c.adapter_version for c in itertools.chain(*generate(both, PROMPTS))} == {2}
        gone.clear()
        with pytest.raises(
            RunError, match="none is left"
        ):  # nor will one be before the next version
            streamed(alone, PROMPTS)
        alone.publish(policy, 3)
        assert len(streamed(alone, PROMPTS)) == 3
        gone.append(True)
        alone.prefetch(PROMPTS[:1], [7])
        assert all(wait(alone._ahead.values()).done)  # each with an error
        gone.clear()
        alone.publish(policy, 4)
        assert len(alone.generate(PROMPTS[:1], [7])) == 1  # asked again


@pytest.mark.slow
def test_a_lost_server_is_dropped_and_its_work_moved(
    server, tiny_model, make_policy, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(server_engine, "HEALTH_INTERVAL", 0.2)
    monkeypatch.setattr(server_engine, "HEALTH_TIMEOUT", 10.0)
    policy, prompts = make_policy(), PROMPTS * 12
    with (
        serving(tiny_model, tmp_path) as (other, group),
        connected(tmp_path, server, other) as engine,
    ):

        def publish(version):
            engine.publish(policy, version)
            return [
                url
                for url in (server, other)
                if any(name.endswith(f"-v{version}") for name in adapters(url))
            ]

        assert publish(101) == [server, other]
        expected = tokens(generate(engine, prompts))

        # One that hangs is noticed, and takes part again once it answers.
        os.killpg(group, signal.SIGSTOP)
        assert tokens(generate(engine, prompts)) == expected
        assert f"going on without {other} (it does not answer)" in caplog.text
        engine.publish(policy, 102)  # which does not wait for it
        os.killpg(group, signal.SIGCONT)
        assert ask(other, "/health").status_code == 200
        assert publish(103) == [server, other]

        # One that has lost the adapter, since it was restarted, gets none of the work done.
        caplog.clear()
        (name,) = (name for name in adapters(other) if name.endswith("-v103"))
        assert (
            ask(other, "/v1/unload_lora_adapter", "POST", content={"lora_name": name}).status_code
            == 200
        )
        assert tokens(generate(engine, prompts)) == expected
        assert publish(104) == [server, other]

        # One that dies in the middle of a batch.
        caplog.clear()
        prompts = PROMPTS * 60  # more than is done before it dies
        expected, stream = (
            streamed(engine, prompts),
            engine.stream(prompts, range(180), [DECODING] * 180),
        )
        index, first = next(stream)
        os.killpg(group, signal.SIGKILL)
        assert {index: first.token_ids} | {i: c.token_ids for i, c in stream} == expected
        assert f"going on without {other}" in caplog.text
        engine.publish(policy, 105)
        assert {c.adapter_version for c in itertools.chain(*generate(engine, PROMPTS))} == {105}


@pytest.fixture
def served(engine, server, write_config):
    def write(name, *, max_lag=0, **changes):
        rollout = {
            "engine": "server",
            "servers": [server],
            "max_lag": max_lag,
            "num_generations": 4,
        }
        rollout |= {"max_completion_length": 8}
        return write_config(
            rollout=rollout,
            output_dir=name,
            train__learning_rate=1e-4,
            train__max_steps=3,
            **changes,
        )

    return write


@pytest.mark.slow
def test_two_processes_make_the_same_run_as_one(served, tmp_path):
    """An adapter that one of them publishes reaches the other."""
    in_two_processes(served(str(tmp_path / "two")), tmp_path)
    one = run(served(str(tmp_path / "one")))
    assert all(m["updates"] == 2 and m["silenced_share"] > 0 for m in one)
    assert all(m["lag_max"] == 0 for m in one)
    same_metrics(read_metrics(tmp_path / "two"), one)


def test_a_run_that_samples_ahead(served, tmp_path):
    metrics = run(served(str(tmp_path / "ahead"), max_lag=2))
    assert [m["lag_max"] for m in metrics] == [0, 1, 2]
    assert all(m["lag_mean"] <= m["lag_max"] for m in metrics)
    assert (
        metrics[1]["sampler_gap_mean"] > 1e-5 > metrics[0]["sampler_gap_mean"]
    )  # the adapters' difference, corrected
    assert metrics[0]["updates"] == 2


def test_a_server_gets_the_same_arguments_as_an_engine_in_the_process(write_config, capsys):
    """As vLLM's own parser reads them, for a card; it does not start with one that it cannot
    take."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert command("serve", write_config(), "rollout.vllm.kv_cach_dtype=fp8") == 2
    assert "did you mean 'kv_cache_dtype'?" in capsys.readouterr().err
    given = {
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
    }
    given["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2}
    rollout = {"engine": "server", "max_lag": 3, "max_completion_length": 8, "vllm": given}
    c = load_config(write_config(rollout=rollout))
    arguments = serve.server_arguments(c, "127.0.0.1", 8000, on_cpu=False)
    parsed, of_the_server = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(
        arguments
    )
    assert of_the_server == [
        "--host", "127.0.0.1", "--port", "8000", "--uvicorn-log-level", "warning",
        "--middleware", "stapo_lite.extras.servers.serve.ask_for_key",
    ]  # fmt: skip
    longest = c.data.max_prompt_length + c.rollout.max_completion_length
    expected = engine_arguments(
        c.model, c.dtype, longest, c.rollout, c.lora, max_loras=4, on_cpu=False
    )
    expected |= {"hf_overrides": {"head_dtype": "float32"}, "max_num_batched_tokens": 2048}
    expected |= given | {"logprobs_mode": "processed_logprobs"}
    expected.pop("quantization")  # None
    compilation = expected.pop("compilation_config")
    assert parsed.compilation_config.cudagraph_specialize_lora is False
    assert compilation == {"cudagraph_specialize_lora": False}
    assert {name: getattr(parsed, name) for name in expected} == expected
