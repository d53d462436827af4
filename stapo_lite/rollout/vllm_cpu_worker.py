"""The module that a vLLM server imports in its worker processes on a CPU (`--worker-extension-cls`)."""

from stapo_lite.rollout import vllm_cpu_lora

vllm_cpu_lora.install()


class WorkerExtension:
    """Adds nothing to vLLM's worker: the module's import is what counts."""
