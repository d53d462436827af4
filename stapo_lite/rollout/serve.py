"""A vLLM server for a run's rollouts, on this machine's cards:

    python -m stapo_lite.rollout.serve configs/qwen8b_lora_server.yaml [key.sub=value ...] [--host H] [--port P]

It is vLLM's own OpenAI-compatible server with the settings that training needs, and with a place where trainers that
share no disk with it put their adapters. It listens on this machine only, unless given a `--host`, and asks for an API
key: `VLLM_API_KEY`, or the user's own (`server_engine.api_key`).
"""

import argparse
import hmac
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from stapo_lite.config import Config, load_config, one_line_errors
from stapo_lite.rollout import check_vllm, resolve_engine
from stapo_lite.rollout.server_engine import api_key
from stapo_lite.rollout.vllm_engine import BATCHED_TOKENS, cpu_batched_tokens, hf_overrides, served_rank

FOLDER = "stapo_lite-uploads-"
FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTER = re.compile(rf"/v1/adapters/(\w[\w-]*)(?:/({'|'.join(map(re.escape, FILES))}))?")


class AdapterUploads:
    """ASGI middleware: PUT /v1/adapters/NAME/FILE stores a file of an adapter and answers with its folder; DELETE
    /v1/adapters/NAME drops it. Nothing but the two files of a PEFT adapter is taken. Without the API key it answers no
    request but for the server's health; vLLM itself asks for the key on some paths only."""

    def __init__(self, app: Any):
        self._app = app
        for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):  # by a server that was killed
            if not psutil.pid_exists(int(left.name.split("-")[2])):
                shutil.rmtree(left, ignore_errors=True)
        self._folder = tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        from starlette.datastructures import Headers
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        given, expected = Headers(scope=scope).get("Authorization", ""), f"Bearer {os.environ['VLLM_API_KEY']}"
        if not hmac.compare_digest(given.encode(), expected.encode()):
            await PlainTextResponse("Unauthorized", 401)(scope, receive, send)
            return
        match = ADAPTER.fullmatch(scope["path"])
        if match is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, folder = Request(scope, receive), Path(self._folder.name) / match[1]
        if request.method == "PUT" and match[2]:
            folder.mkdir(exist_ok=True)
            part = folder / f"{match[2]}.part"
            with part.open("wb") as file:
                async for chunk in request.stream():
                    file.write(chunk)
            part.replace(folder / match[2])  # vLLM may still read what an upload that is repeated brought
            response = PlainTextResponse(str(folder))
        elif request.method == "DELETE" and not match[2]:
            shutil.rmtree(folder, ignore_errors=True)
            response = PlainTextResponse("")
        else:
            response = PlainTextResponse("Method Not Allowed", 405)
        await response(scope, receive, send)


def server_arguments(config: Config, host: str, port: int) -> list[str]:
    """The arguments that vLLM's server is started with."""
    r, on_gpu = config.rollout, torch.cuda.is_available()
    longest = config.data.max_prompt_length + r.max_completion_length
    arguments = [
        *("--model", r.model or config.model, "--dtype", config.dtype, "--host", host, "--port", str(port)),
        *(
            "--max-model-len",
            str(longest),
            "--max-num-seqs",
            str(r.max_num_seqs),
            "--tensor-parallel-size",
            str(r.tensor_parallel_size),
        ),
        *("--enable-lora", "--max-lora-rank", str(served_rank(config.lora.r)), "--max-loras", str(r.max_lag + 1)),
        *("--lora-target-modules", *config.lora.target_modules),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--middleware", "stapo_lite.rollout.serve.AdapterUploads", "--uvicorn-log-level", "warning"),
        "--disable-log-stats",  # which would remember the name of every adapter
    ]
    if r.quantization:
        arguments += ["--quantization", r.quantization]
    if on_gpu:
        memory = ("--gpu-memory-utilization", str(r.gpu_memory_utilization))
        head = ("--hf-overrides", json.dumps(hf_overrides(r.model or config.model, r.quantization)))
        return [*arguments, *memory, *head, "--max-num-batched-tokens", str(BATCHED_TOKENS)]
    return [
        *arguments,
        *("--enforce-eager", "--kv-cache-memory-bytes", str(int(r.kv_cache_gb * 2**30))),
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(cpu_batched_tokens(longest))),
        *("--worker-extension-cls", "stapo_lite.rollout.vllm_cpu_worker.WorkerExtension"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m stapo_lite.rollout.serve", description="Serve a run's rollouts by vLLM."
    )
    parser.add_argument("config", type=Path, help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replace values of the config")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; this machine only by default")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_intermixed_args()
    with one_line_errors():
        config = load_config(given.config, given.overrides)
        resolve_engine("vllm")
        check_vllm(config.rollout.quantization, sleep_level=0)
        arguments = server_arguments(config, given.host, given.port)
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if not torch.cuda.is_available():
        environment["TORCH_COMPILE_DISABLE"] = "1"  # ten seconds at the first request that gain nothing
    host = socket.gethostname() if given.host in ("0.0.0.0", "::") else given.host
    print(f"serving {arguments[1]}: rollout.engine=server rollout.servers=[http://{host}:{given.port}]", flush=True)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    os.execve(sys.executable, command, environment | os.environ | {"VLLM_API_KEY": api_key()})


if __name__ == "__main__":
    main()
