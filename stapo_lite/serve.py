"""A vLLM server for a run's rollouts, on this machine's cards:

    stapo serve configs/qwen8b_lora_server.yaml [key.sub=value ...] [--host H] [--port P]

It is vLLM's own OpenAI-compatible server with the settings that training needs. It listens on this machine only, unless
given a `--host`, and asks for an API key: `VLLM_API_KEY`, or the user's own (`server_engine.api_key`).
"""

import hmac
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from stapo_lite.config import Config
from stapo_lite.rollout import resolve_engine
from stapo_lite.rollout.vllm_options import check_vllm, engine_arguments


async def ask_for_key(request: Any, go_on: Callable[[Any], Awaitable[Any]]) -> Any:
    """HTTP middleware: refuse every request without the API key, except for the server's health (/health); vLLM itself
    asks for the key on some paths only."""
    given, expected = request.headers.get("Authorization", ""), f"Bearer {os.environ['VLLM_API_KEY']}"
    if request.url.path != "/health" and not hmac.compare_digest(given.encode(), expected.encode()):
        from starlette.responses import PlainTextResponse  # installed with vLLM

        return PlainTextResponse("Unauthorized", 401)
    return await go_on(request)


def server_arguments(config: Config, host: str, port: int, on_cpu: bool) -> list[str]:
    """The arguments that vLLM's server is started with."""
    r, longest = config.rollout, config.max_sequence_length
    arguments = engine_arguments(
        r.model or config.model, config.dtype, longest, r, config.lora, max_loras=r.max_lag + 1, on_cpu=on_cpu
    )
    arguments |= {"host": host, "port": port, "uvicorn_log_level": "warning"}
    arguments["middleware"] = "stapo_lite.serve.ask_for_key"
    return [part for name, value in arguments.items() for part in flag(name.replace("_", "-"), value)]


def flag(name: str, value: Any) -> list[str]:
    """An argument as vLLM's command line has it."""
    if value is None or isinstance(value, bool):
        return [] if value is None else [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    return [f"--{name}", *map(str, values)]


def serve(config: Config, host: str, port: int) -> None:
    """Become the server.

    Raises:
        InputError: vLLM is missing, cannot take an argument, or does not fit the card.
    """
    resolve_engine("vllm")
    check_vllm(config.rollout)
    import torch  # slow, as the next ones

    from stapo_lite.model.processes import resolve_dtype
    from stapo_lite.planning.choice import fit_server
    from stapo_lite.rollout.server_engine import api_key

    on_cpu = not torch.cuda.is_available()
    config = fit_server(config.model_copy(update={"dtype": resolve_dtype(config.dtype)}))
    flags = server_arguments(config, host, port, on_cpu)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "WARNING"
    if on_cpu:
        environment["TORCH_COMPILE_DISABLE"] = "1"  # compiling costs the first request ten seconds, gains nothing
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    print(f"serving {flags[1]}: rollout.engine=server rollout.servers=[http://{name}:{port}]", flush=True)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    os.execve(sys.executable, command, environment | os.environ | {"VLLM_API_KEY": api_key()})
