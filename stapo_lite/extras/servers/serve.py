"""A vLLM server for a run's rollouts, on this machine's cards:

    stapo serve configs/qwen8b_lora_server.yaml [key.sub=value ...] [--host H] [--port P]

This is vLLM's own OpenAI-compatible server with the settings that training needs. It listens on
localhost unless given a `--host`, and requires an API key: `VLLM_API_KEY`, or the user's
(`engine.api_key`).
"""

import json
import os
import sys
from typing import Any

from stapo_lite.config import Config
from stapo_lite.rollout.vllm_options import engine_arguments


def server_arguments(config: Config, host: str, port: int, on_cpu: bool) -> list[str]:
    """Command-line arguments for vLLM's server."""
    rollout = config.rollout
    arguments = engine_arguments(
        config.model,
        config.dtype,
        config.max_sequence_length,
        rollout,
        config.lora,
        max_loras=rollout.max_lag + 1,
        on_cpu=on_cpu,
    )
    arguments |= {"host": host, "port": port, "uvicorn_log_level": "warning"}
    flags = []
    for name, value in arguments.items():
        flags += flag(name.replace("_", "-"), value)
    return flags


def flag(name: str, value: Any) -> list[str]:
    """An argument in the form of vLLM's command line."""
    if value is None:
        return []
    if value is False:
        return [f"--no-{name}"]
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, dict):
        value = json.dumps(value)
    return [f"--{name}", str(value)]


def become_server(config: Config, host: str, port: int) -> None:
    """Replace this process with vLLM's server.

    Args:
        config: with the data type resolved.
    """
    import torch  # slow to import, like the next one

    from stapo_lite.extras.servers.engine import api_key

    on_cpu = not torch.cuda.is_available()
    flags = server_arguments(config, host, port, on_cpu)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "WARNING"
    if on_cpu:  # compiling costs the first request ten seconds and gains nothing
        environment["TORCH_COMPILE_DISABLE"] = "1"
    environment |= os.environ | {"VLLM_API_KEY": api_key()}
    # The trainer's setting of torch's allocator breaks vLLM's all-reduce between cards.
    del environment["PYTORCH_CUDA_ALLOC_CONF"]
    address = f"rollout.engine=server rollout.servers=[http://{host}:{port}]"
    print(f"serving {config.model}: {address}", flush=True)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    os.execve(sys.executable, command, environment)
