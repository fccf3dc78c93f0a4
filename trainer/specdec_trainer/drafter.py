"""What every drafter offers, whatever its algorithm.

An algorithm is one class with this interface in ``algorithms.ALGORITHMS``.

Shapes: n rows, A captured states a row, H hidden size, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loss import chunk_rows, first_choice
from .tiles import pad_tail

if TYPE_CHECKING:
    from .batch import Batch
    from .model import DraftConfig


T = TypeVar("T")


@dataclass(slots=True)
class Step:
    """One drafted token of the supervised rows that still have a token to predict."""

    index: int
    """0 for the first drafted token."""
    rows: Tensor
    """Index of each chain into the batch's supervised rows, ascending int64 ``[n]``."""
    hidden: Tensor
    """States before the draft head ``[n, H]``."""

    @property
    def teacher_rows(self) -> Tensor:
        """Supervised row whose teacher this step is compared with ``[n]``."""
        return self.rows + self.index


Chains = Generator[Step, "Tensor | None", None]


class Drafter(nn.Module):
    """A draft model: its input, its steps, and how an engine knows it."""

    title: ClassVar[str]
    """Of the algorithm, for people."""
    method: ClassVar[str]
    """``method`` of vLLM's ``--speculative-config``."""
    serving: ClassVar[dict[str, Any]] = {}
    """More keys that ``--speculative-config`` needs."""
    reads: ClassVar[Literal["aux", "final"]] = "aux"
    """Which captured states are its input."""
    needs_context: ClassVar[bool] = True
    """Whether it attends to earlier positions, so that its input must be captured there too."""
    own_head: ClassVar[bool] = True
    """Whether the engine reads a head from the drafter's folder; otherwise it lends the target's."""
    reducible: ClassVar[bool] = True
    """Whether it can propose from a part of the target's vocabulary."""
    unused: ClassVar[dict[str, Any]] = {}
    """Keys of ``config.json`` that this algorithm does not write, with values for ``DraftConfig``."""
    feature_weight: ClassVar[float] = 0.0
    """Default weight of ``feature_loss``."""
    fixed_steps: ClassVar[bool] = False
    """Whether its weights are made for a number of draft tokens (``DraftConfig.draft_steps``)."""
    needs_mask_token: ClassVar[bool] = False
    """Whether it reads the embedding of ``DraftConfig.mask_token_id``."""
    wide_activations: ClassVar[int] = 10
    """Numbers as wide as a state that autograd keeps in the first layer of one step."""

    def __init__(self, config: DraftConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.input_dropout = 0.0
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("embed_weight", torch.empty(0), persistent=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    # -- forward

    def forward(self, work: Callable[[], T]) -> T:
        """Do some work that uses the parameters.

        Sharded parameters are gathered before one forward pass of the module and released later, so all that
        uses them is one call: every step, and the head inside the loss.
        """
        return work()

    def chains(self, batch: Batch, steps: int) -> Chains:
        """Yield step 0, 1, .. of all supervised rows.

        Send a bool mask ``[n]`` into the generator to drop chains before the next step.
        """
        raise NotImplementedError

    def propose(self, states: Tensor, tokens: Tensor, *, steps: int, first_position: int = 0) -> Tensor:
        """Draft greedily after one prefix, as a server does.

        Args:
            states: Captured states of the prefix ``[n, A, H]``.
            tokens: x[t+1] of its rows ``[n]``; the last one is the token just sampled.
            steps: Tokens to draft.
            first_position: Position of row 0.

        Returns:
            Target ids ``[steps]`` int64.
        """
        raise NotImplementedError

    def feature_loss(self, hidden: Tensor, final: Tensor) -> Tensor:
        """Distance of each drafted state ``[n, H]`` from the target's final one, ``[n]`` float32."""
        return 1.0 - F.cosine_similarity(hidden.float(), final.float(), dim=-1)

    def start(self, generator: torch.Generator) -> None:
        """Random initial weights."""
        init_weights(self, generator)

    # -- facts

    def summary(self, reason: str) -> str:
        """One line for logs and the model card.

        Args:
            reason: Where the sizes of its layers come from.
        """
        return f"{self.title} {self.config.layer}, {self.config.num_layers} layer(s): {reason}"

    @classmethod
    def activations(cls, draft: DraftConfig, steps: int) -> int | None:
        """Numbers that autograd keeps for a row that starts a chain; None: as many as EAGLE-3's layers."""
        return None

    # -- engines

    @classmethod
    def recognises(cls, config: dict[str, Any]) -> bool:
        """Whether a ``config.json``, of any exporter, describes a drafter of this algorithm."""
        return False

    @classmethod
    def engine_config(cls, draft: DraftConfig, facts: dict[str, Any]) -> dict[str, Any]:
        """``config.json`` for vLLM.

        Args:
            draft: Of the drafter.
            facts: What an EAGLE-3 drafter of these sizes would write.
        """
        return facts

    @classmethod
    def parse(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Fields of ``DraftConfig`` that only this algorithm's ``config.json`` tells."""
        return {}

    def engine_tensors(self) -> dict[str, Tensor]:
        """Tensors under the names that vLLM reads; never the embedding."""
        return {name: value for name, value in self.state_dict().items() if name != "d2t"}

    @classmethod
    def own_names(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """``engine_tensors`` back under the names of ``state_dict``."""
        return dict(tensors)

    # -- tables

    @property
    def reduced_vocab(self) -> bool:
        """The drafter proposes from a part of the target's vocabulary."""
        return self.config.draft_vocab_size != self.config.vocab_size

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return draft_ids + self.d2t[draft_ids]

    def best(self, hidden: Tensor) -> Tensor:
        """Target ids of the head's first choices for states ``[n, H]``."""
        rows = self.lm_head.weight.to(hidden.dtype).T
        parts = hidden.split(chunk_rows(rows.shape[1], hidden.device))
        return self.target_ids(
            torch.cat([first_choice(pad_tail(part) @ rows)[: len(part)] for part in parts])
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embedding rows ``[n, H]`` of target ids; the table is the target's and is not trained."""
        return F.embedding(token_ids, self.embed_weight).to(self.compute_dtype)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters that the optimizer changes."""
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]


def init_weights(model: nn.Module, generator: torch.Generator, *, std: float = 0.02) -> None:
    """Normal matrices, norms of one, no biases; the head is left for the target's rows."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            elif not name.startswith("lm_head"):
                p.normal_(0.0, std, generator=generator)
