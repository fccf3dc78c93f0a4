"""What one batch costs: the TTT unroll against the teacher, as sums and counts.

An objective is an object with ``model``, ``loss(batch, generator) -> Sums`` and ``matches(batch)``; the
loop, the checkpoints and the evaluation know nothing else. The one here serves every drafter whose steps are
compared with the target's distribution, whatever their algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .batch import Batch
from .drafter import Drafter
from .dtypes import wide
from .loss import TeacherHead, overlap_loss, soft_cross_entropy


@dataclass(slots=True)
class Sums:
    """Sums over supervised rows; divide by ``count`` once, at the edge. All ``[steps]`` but ``total``."""

    total: Tensor
    """Scalar with a gradient: the weighted loss summed over rows and steps."""
    loss: Tensor
    """Unweighted loss of each step, detached."""
    correct: Tensor
    """Rows whose greedy draft token is the target's."""
    count: Tensor
    """Rows compared at each step."""
    lost: Tensor
    """Rows without loss because the draft vocabulary lacks the target's token."""


@dataclass(slots=True)
class Matches:
    """Where the greedy draft token of each step is right, bool ``[supervised rows, steps]``."""

    greedy: Tensor
    """It is the target's most likely token: what a greedy request would accept."""
    traffic: Tensor
    """It is the token that the target generated: what a request sampled like the captured ones would accept,
    since a server takes one draft token with the probability that the target gives it."""


@dataclass(slots=True)
class Taught:
    """What the supervised rows of a batch are compared with."""

    teacher: TeacherHead
    head: Tensor
    """Rows of the drafter's head ``[V, H]``."""
    centroid: Tensor
    """``[N, H]``, see ``loss``."""
    best: Tensor
    """Row of the head that is the target's token ``[N]``; -1 where there is none."""
    final: Tensor
    """Final states of the target ``[N, H]``; zeros where they are not known."""
    label: Tensor
    """Row of the head that is all that is known of the target's distribution ``[N]``, else -1."""


class Objective(Protocol):
    """A training algorithm, as the loop sees it."""

    model: nn.Module
    steps: int

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Sums: ...
    def matches(self, batch: Batch, steps: int) -> tuple[Matches, Sums]: ...


class Eagle3Objective:
    """EAGLE-3: soft cross-entropy at every TTT step, teacher-forced tokens."""

    def __init__(
        self,
        model: Drafter,
        teacher: TeacherHead,
        *,
        steps: int,
        decay: float = 0.8,
        broken_keep: float = 1.0,
        noise: float = 0.0,
        feature_weight: float = 0.0,
        form: str = "ce",
        loss_rows: Tensor | None = None,
        loss_teacher: TeacherHead | None = None,
    ) -> None:
        """Bind model and teacher.

        Args:
            model: The drafter.
            teacher: Head of the target.
            steps: TTT steps, at least 1.
            decay: Weight of step k is ``decay ** k``.
            broken_keep: Share of chains continued after the drafter's token was wrong, 0 to 1. A server never
                continues them; 1 is plain TTT.
            noise: Uniform noise on the aux states, as a share of their standard deviation.
            feature_weight: Weight of the distance between the drafter's state and the target's.
            form: Of the loss: ``ce``, ``tv``, ``lk`` or a sum such as ``ce+lk``.
            loss_rows: Draft ids that the training loss is taken over ``[L]``; None for all. Only with a
                frozen head: its other rows are the target's and follow by themselves. Evaluation sees every
                row.
            loss_teacher: Teacher over these rows.
        """
        self.model, self.teacher = model, teacher
        self.steps, self.decay = steps, decay
        self.broken_keep, self.noise = broken_keep, noise
        self.feature_weight = feature_weight
        self.forms = form.split("+")
        self.loss_rows, self.loss_teacher = loss_rows, loss_teacher
        self._loss_head: Tensor | None = None

    def teach(self, batch: Batch, *, training: bool) -> Taught:
        """What every supervised row is compared with. In training the head may be a part of the drafter's."""
        teacher, head = self.teacher, self.model.lm_head.weight
        if training and self.loss_rows is not None:
            if self._loss_head is None:
                self._loss_head = head.detach()[self.loss_rows]
            teacher, head = self.loss_teacher, self._loss_head
        final = batch.final.to(self.model.compute_dtype)
        with torch.no_grad():
            greedy = self.teacher.greedy(final) if batch.greedy is None else batch.greedy
        said = teacher(final, greedy, head, batch.centroid)
        batch.notes["greedy"] = greedy
        if not head.requires_grad:
            batch.notes["centroid"] = said.centroid
        taught = Taught(teacher, head, said.centroid, said.best, final, torch.full_like(said.best, -1))
        if len(batch.taught) == batch.num_supervised:
            return taught
        # Rows without a teacher learn their token itself.
        labels = teacher.to_draft[batch.labels]
        taught.best = labels.index_copy(0, batch.taught, said.best)
        taught.label = labels.index_copy(0, batch.taught, taught.label)
        centroid = head[labels.clamp(min=0)].to(said.centroid.dtype)
        taught.centroid = centroid.index_copy(0, batch.taught, said.centroid)
        taught.final = final.new_zeros(batch.num_supervised, final.shape[1])
        taught.final[batch.taught] = final
        return taught

    def compare(
        self, taught: Taught, hidden: Tensor, source: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of some drafted states ``[n, H]`` against the teacher's rows ``source``; see ``loss``."""
        best, parts = taught.best[source], []
        for form in self.forms:
            if form == "ce":
                parts.append(soft_cross_entropy(hidden, taught.head, taught.centroid[source], best, weight))
            else:
                parts.append(
                    overlap_loss(
                        hidden, taught.head, taught.teacher, taught.final[source], taught.label[source], best,
                        weight, form,
                    )
                )  # fmt: skip
        return sum(p[0] for p in parts), sum(p[1] for p in parts), parts[0][2]

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Sums:
        """Loss of one batch with its gradient graph."""
        return self._pass(batch, self.steps, generator, None)

    @torch.no_grad()
    def matches(self, batch: Batch, steps: int) -> tuple[Matches, Sums]:
        """Where the greedy draft token of each step is right, and the sums."""
        shape = batch.num_supervised, steps
        tables = Matches(*(torch.zeros(shape, dtype=torch.bool, device=batch.rows.device) for _ in range(2)))
        return tables, self._pass(batch, steps, None, tables)

    def _pass(
        self, batch: Batch, steps: int, generator: torch.Generator | None, tables: Matches | None
    ) -> Sums:
        def work() -> tuple[Tensor, ...]:
            # A plain tuple, so that hooks on the module's output find its tensors.
            sums = self._run(batch, steps, generator, tables)
            return sums.total, sums.loss, sums.correct, sums.count, sums.lost

        return Sums(*self.model(work))

    def _run(
        self, batch: Batch, steps: int, generator: torch.Generator | None, tables: Matches | None
    ) -> Sums:
        device = batch.rows.device
        model = self.model
        if self.noise and model.training:
            batch = _with_noise(batch, self.noise, generator)
        taught = self.teach(batch, training=tables is None)
        dtype = wide(model.compute_dtype)
        total = torch.zeros((), device=device, dtype=dtype)
        sums = [torch.zeros(steps, device=device, dtype=dtype) for _ in range(4)]
        chains = model.chains(batch, steps)
        keep: Tensor | None = None
        while True:
            try:
                step = chains.send(keep)
            except StopIteration:
                break
            k, source = step.index, step.teacher_rows
            known = taught.best[source] >= 0
            weight = batch.weight[source] * known * self.decay**k
            part, rows_loss, correct = self.compare(taught, step.hidden, source, weight)
            total = total + part
            if self.feature_weight and model.training and len(batch.taught) == batch.num_supervised:
                away = model.feature_loss(step.hidden, batch.final[source])
                total = total + self.feature_weight * (weight * away).sum()
            for s, value in zip(
                sums, (rows_loss * known, correct, torch.ones_like(known), ~known), strict=True
            ):
                s[k] = value.sum()
            if tables is not None:
                tables.greedy[step.rows, k] = correct
                tables.traffic[step.rows, k] = model.best(step.hidden) == batch.labels[source]
            keep = None
            if model.training and self.broken_keep < 1.0:
                lucky = torch.rand(len(correct), generator=generator).to(device) < self.broken_keep
                keep = correct | lucky
        loss, correct_sum, count, lost = sums
        return Sums(total, loss, correct_sum, count, lost)


def _with_noise(batch: Batch, share: float, generator: torch.Generator | None) -> Batch:
    """The batch with uniform noise on its aux states; the captured tensors themselves are left alone."""
    from dataclasses import replace

    aux = batch.aux.float()
    scale = aux.std(dim=(0, 2), keepdim=True) * (share * 12**0.5)
    noise = torch.rand(aux.shape, generator=generator).to(aux.device) - 0.5
    return replace(batch, aux=(aux + noise * scale).to(batch.aux.dtype))
