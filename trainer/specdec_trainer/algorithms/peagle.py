"""P-EAGLE: an EAGLE-3 drafter that proposes all its tokens in one forward pass.

After the last known token the drafter reads placeholders instead of its own states and tokens: one learnt
state (``mask_hidden``, in the space of the captured states) and the embedding of one fixed token. A
placeholder at depth k sees the prefix and the placeholders before it, the same pattern as step k of
training-time test, but none waits for another.

Layout: EAGLE-3's plus ``mask_hidden`` and the token's id, served with ``parallel_drafting``. The architecture
stays EAGLE-3's: vLLM 0.32 has aliases for P-EAGLE, but reads them in the speculators format only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec_tap.errors import ConfigError

from ..drafter import init_weights
from ..model import DraftConfig, Eagle3Drafter


class ParallelEagleDrafter(Eagle3Drafter):
    """EAGLE-3's layers, fed with placeholders after the first token."""

    title = "P-EAGLE"
    serving = {"parallel_drafting": True}  # noqa: RUF012  # read only
    needs_mask_token = True

    def __init__(self, config: DraftConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        if config.mask_token_id is None or not 0 <= config.mask_token_id < config.vocab_size:
            raise ConfigError(
                f"mask_token_id is {config.mask_token_id}; expected an id of the target's vocabulary "
                f"(0 to {config.vocab_size - 1:,})"
            )
        if config.layer != "llama":
            raise ConfigError(f"algorithm peagle with layer {config.layer!r}; train it with layer llama")
        super().__init__(config, compute_dtype=compute_dtype)
        self.mask_hidden = nn.Parameter(torch.zeros(1, len(config.aux_layer_ids) * config.hidden_size))

    def start(self, generator: torch.Generator) -> None:
        init_weights(self, generator)
        with torch.no_grad():
            self.mask_hidden.normal_(0.0, 1.0, generator=generator)

    def feed(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Placeholders for the next draft step; neither the drafted state nor its token is read."""
        mask = self.combine(self.mask_hidden.view(1, len(self.config.aux_layer_ids), -1))
        token = self.embed(tokens.new_full((1,), self.config.mask_token_id))
        return mask.expand(len(tokens), -1), token.expand(len(tokens), -1)

    @classmethod
    def recognises(cls, config: dict[str, Any]) -> bool:
        architecture = str((config.get("architectures") or [""])[0])
        if config.get("speculators_model_type") == "peagle" or architecture.lower().startswith("peagle"):
            return True
        mask = (config.get(name) for name in ("mask_token_id", "pard_token", "ptd_token_id"))
        return any(value is not None for value in mask)

    @classmethod
    def engine_config(cls, draft: DraftConfig, facts: dict[str, Any]) -> dict[str, Any]:
        return {
            **facts,
            "mask_token_id": draft.mask_token_id,
            "pard_token": draft.mask_token_id,
        }

    @classmethod
    def parse(cls, config: dict[str, Any]) -> dict[str, Any]:
        for name in ("mask_token_id", "pard_token", "ptd_token_id"):
            if config.get(name) is not None:
                return {"mask_token_id": int(config[name])}
        return {}
