"""Several processes training one drafter: gradients and counts are summed once for each step.

Every process runs the same number of steps (see ``share``), so no collective ever waits for a process that
has no data. The drafter is small beside its target, so plain replication is enough.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

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
        """Sum gradients in place, and some counts, over all processes; returns the counts."""
        if self.size == 1:
            return counts
        device = parameters[0].device
        flat = [torch.tensor(counts, dtype=torch.float64, device=device)]
        dist.all_reduce(flat[0])
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        buffer = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(buffer)
        at = 0
        for p in parameters:
            p.grad.copy_(buffer[at : at + p.numel()].view_as(p))
            at += p.numel()
        return flat[0].tolist()

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over all processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def failures(self, failed: bool) -> int:
        """How many processes failed; everyone gets the same number, so everyone can stop."""
        if self.size == 1:
            return int(failed)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        value = torch.tensor([int(failed)], device=device)
        dist.all_reduce(value)
        return int(value)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


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
