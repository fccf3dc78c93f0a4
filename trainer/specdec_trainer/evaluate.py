"""Held-out numbers: loss and accuracy by draft position, and the acceptance length a server would see, for
greedy requests and for requests sampled like the captured ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .objective import Objective


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Counts over a set of batches."""

    loss: tuple[float, ...]
    """Sum of the soft cross-entropy by TTT step, in nats."""
    correct: tuple[int, ...]
    count: tuple[int, ...]
    drafts: int
    """Drafting rounds of the simulated server."""
    accepted: tuple[int, ...]
    """Draft tokens accepted by position in those rounds."""
    tokens: int
    """Rows read."""
    sampled_drafts: int = 0
    """Drafting rounds of the server that answers the captured traffic itself."""
    sampled_accepted: tuple[int, ...] = ()
    """Draft tokens accepted by position in those."""

    @property
    def accuracy(self) -> list[float]:
        """Share of rows whose greedy draft token is the target's, by TTT step (not conditional)."""
        return [c / max(1, n) for c, n in zip(self.correct, self.count, strict=True)]

    @property
    def mean_loss(self) -> list[float]:
        return [v / max(1, n) for v, n in zip(self.loss, self.count, strict=True)]

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of simulated rounds whose k-th draft token was accepted."""
        return [a / max(1, self.drafts) for a in self.accepted]

    @property
    def simulated_acceptance_length(self) -> float:
        """Tokens for each target step, the target's own one included."""
        return 1.0 + sum(self.accepted) / max(1, self.drafts)

    @property
    def sampled_acceptance_length(self) -> float:
        """The same for the captured traffic, with the sampling that it had. Equal where it was greedy."""
        return 1.0 + sum(self.sampled_accepted) / max(1, self.sampled_drafts)

    def as_dict(self) -> dict[str, object]:
        return {
            "loss": self.mean_loss,
            "accuracy": self.accuracy,
            "simulated_acceptance_length": self.simulated_acceptance_length,
            "simulated_acceptance_per_position": self.acceptance_per_position,
            "sampled_acceptance_length": self.sampled_acceptance_length,
            "drafts": self.drafts,
            "rows": self.count[0] if self.count else 0,
        }


def simulate(matches: np.ndarray, run_left: np.ndarray) -> tuple[int, np.ndarray]:
    """Walk each supervised run as a server does: draft, accept the right prefix, add the target's token.

    The walk is exact where right means equal to the captured token: a chain goes on only while its tokens are
    the true ones, which is what teacher forcing fed. For greedy traffic that is the target's first choice.

    Args:
        matches: Whether draft token k of each row is right, bool ``[N, K]``.
        run_left: Rows that follow in the same run ``[N]``.

    Returns:
        ``(rounds, accepted by position [K])``.
    """
    steps = matches.shape[1]
    length = np.cumprod(matches, axis=1).sum(axis=1)
    accepted = np.zeros(steps, dtype=np.int64)
    rounds, at = 0, 0
    while at < len(run_left):
        end = at + int(run_left[at]) + 1
        # The first row of a run predicts the first response token, which the prefill itself produces.
        at = min(at + 1, end)
        while at < end:
            n = int(length[at])
            accepted[:n] += 1
            rounds += 1
            at += n + 1
        at = end
    return rounds, accepted


def evaluate(objective: Objective, batches: Iterable[Batch], *, steps: int, draft_tokens: int) -> Evaluation:
    """Evaluate the model as it is; it is put into training mode again if it was.

    Args:
        objective: Algorithm and model.
        batches: Held-out data.
        steps: TTT steps to report.
        draft_tokens: Tokens drafted in each simulated round, at most ``steps``.
    """
    training = objective.model.training
    objective.model.eval()
    totals: list[Tensor] = [torch.zeros(steps, dtype=torch.float64) for _ in range(3)]
    tokens = 0
    drafts = [0, 0]
    accepted = np.zeros((2, draft_tokens), dtype=np.int64)
    try:
        for batch in batches:
            tables, sums = objective.matches(batch, steps)
            for total, value in zip(totals, (sums.loss, sums.correct, sums.count), strict=True):
                total += value.double().cpu()
            for kind, table in enumerate((tables.greedy, tables.traffic)):
                rounds, got = simulate(table[:, :draft_tokens].cpu().numpy(), batch.run_left.cpu().numpy())
                drafts[kind] += rounds
                accepted[kind] += got
            tokens += batch.num_rows
    finally:
        objective.model.train(training)
    loss, correct, count = (t.tolist() for t in totals)
    return Evaluation(
        tuple(loss), tuple(int(c) for c in correct), tuple(int(c) for c in count),
        drafts[0], tuple(accepted[0].tolist()), tokens, drafts[1], tuple(accepted[1].tolist()),
    )  # fmt: skip
