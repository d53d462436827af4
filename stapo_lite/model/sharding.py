"""A frozen base that does not fit one card, spread over the processes by FSDP2.

accelerate's config file (configs/accelerate) says how. The decoder is sharded before it gets its adapter: the
adapter is whole on every process, and so are optimiser, checkpoint and all that is published. A process that has no
tokens left must still run the decoder as often as the others: the processes gather each of its layers together.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stapo_lite.errors import InputError


def make_sharding(device: torch.device) -> Callable[[Any], None] | None:
    """A function that shards a base model that was loaded on the CPU; None where `accelerate launch` was not told to.

    Raises:
        InputError: accelerate was configured for FSDP's first version, for its CPU offload, or for DeepSpeed.
    """
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        fsdp = FullyShardedDataParallelPlugin()  # as the launcher's environment describes it
        if fsdp.fsdp_version != 2:
            raise InputError("accelerate's fsdp_version: 1: set 2, as in configs/accelerate/fsdp2.yaml")
        if isinstance(fsdp.cpu_offload, CPUOffloadPolicy):
            raise InputError("accelerate's fsdp_offload_params: true: the adapter must be where the base is; set false")
        return lambda base: _fsdp2(base, fsdp, device)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise InputError("accelerate's distributed_type: DEEPSPEED: FSDP2 does it here, configs/accelerate/fsdp2.yaml")
    return None


def _fsdp2(base: Any, plugin: Any, device: torch.device) -> None:
    decoder = base.get_decoder()
    loads = plugin.cpu_ram_efficient_loading  # only the first process of each machine has read the weights
    weights = base.state_dict() if loads and dist.get_rank() == 0 else {}
    layers = {parameter for layer in decoder.layers for parameter in layer.parameters()}
    whole = set(decoder.parameters()) - layers  # embedding and norm; the LM head reads its weights by itself
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh, "reshard_after_forward": plugin.reshard_after_forward}
    for layer in decoder.layers:
        fully_shard(layer, **options)
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # the root: layers are fetched one ahead
    _move_the_rest(base, device)
    if loads:
        set_model_state_dict(base, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def _move_the_rest(base: Any, device: torch.device) -> None:
    for tensor in (*base.parameters(), *base.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
