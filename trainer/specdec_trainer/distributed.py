"""Several processes training one drafter: gradients and counts are summed once for each step.

Every process runs the same number of steps (see ``share``), so no collective ever waits for a process that
has no data. A drafter is small beside its target, so every process can hold all of it (``ddp``); with
``fsdp2`` each holds a share of weights, gradients and optimizer state, gathered for one forward and backward
pass at a time. Checkpoints hold whole tensors either way, so any number of processes can go on with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """The process that writes files."""
        return self.rank == 0

    def share(self, batches: Sequence[T]) -> list[T]:
        """This process's batches: the same number for everyone.

        The last few that do not go round are left out of this pass; the next pass is shuffled differently.
        A pass with fewer batches than processes is repeated until everyone has one.
        """
        if self.size == 1:
            return list(batches)
        if len(batches) < self.size:
            return [batches[self.rank % len(batches)]]
        even = len(batches) // self.size * self.size
        return list(batches[self.rank : even : self.size])

    def sum_gradients(self, parameters: list[nn.Parameter], counts: list[float]) -> list[float]:
        """Sum gradients in place, and some counts, over all processes; returns the counts.

        Shares of a gradient were summed by the backward pass already.
        """
        if self.size == 1:
            return counts
        total = torch.tensor(counts, dtype=torch.float64, device=parameters[0].device)
        dist.all_reduce(total)
        for p in parameters:
            if is_sharded(p):
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        return total.tolist()

    def send_weights(self, model: nn.Module) -> None:
        """Give every process the first one's trained weights."""
        if self.size > 1:
            for p in model.parameters():
                if p.requires_grad:
                    dist.broadcast(p.data, 0)

    def any(self, flag: bool) -> bool:
        """Whether any process says yes; everyone gets the same answer, so everyone does the same next."""
        if self.size == 1:
            return flag
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        value = torch.tensor([int(flag)], device=device)
        dist.all_reduce(value)
        return bool(value)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def shard(model: nn.Module, device: torch.device, group: Group) -> None:
    """Keep a share of every trained parameter in this process (FSDP2). Frozen ones stay whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(
        model,
        mesh=init_device_mesh(device.type, (group.size,)),
        # The steps of one forward pass use the same weights many times: gather them once.
        reshard_after_forward=False,
        ignored_params={p for p in model.parameters() if not p.requires_grad},
    )
    # Gradients are sums over rows; they are divided once, by the rows of all processes.
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)


def sum_after_backward(model: nn.Module, last: bool) -> None:
    """Of several batches in one step, let only the last one's backward pass sum gradients."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)


def release(model: nn.Module) -> None:
    """Forget weights gathered for a forward pass that no backward pass followed."""
    if hasattr(model, "reshard"):
        model.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a process holds only a share of it. Not asked by type: importing DTensor takes 40 MB."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This process's share of a tensor, sharing memory; all of one that is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every process must ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, sharded as ``pattern`` is if they have the same shape."""
    if not is_sharded(pattern) or tensor.shape != pattern.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(pattern.device)
    return distribute_tensor(tensor, pattern.device_mesh, pattern.placements, src_data_rank=None)


def whole_state(model: nn.Module) -> dict[str, Any]:
    """State of a model with whole tensors; every process must ask."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def join(timeout_s: float = 600.0) -> Group:
    """Join the group that torchrun described in the environment; alone without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        backend = "nccl"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return Group(dist.get_rank(), size, local)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
