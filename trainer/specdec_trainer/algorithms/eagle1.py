"""EAGLE-1, which is also EAGLE-2: the drafter continues the target's final states themselves.

Row t reads ``final[t]`` (after the norm) and token x[t+1] and predicts ``final[t+1]``; the target's own head
turns it into a token. The loss is cross-entropy against the target's distribution and the distance to its
state. EAGLE-2 differs in the tree that an engine grows from the same weights.

Layout: vLLM's ``EagleLlamaForCausalLM``: ``fc`` without bias over (embedding, state), a Llama layer without
input norm, no final norm, no head.

Source: EAGLE (arXiv:2401.15077), EAGLE-2 (arXiv:2406.16858).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_tap.errors import ConfigError

from ..drafter import Chains, Drafter, init_weights
from ..layers import EngineNames, LlamaLayer, project
from ..model import DraftConfig
from ..ttt import propose, unroll


class Eagle1Layer(LlamaLayer):
    """Llama's layer; the first one fuses embedding and state, and has no norm before attention."""

    engine = EngineNames("llama", "EagleLlamaForCausalLM", norm_before_fc=False)

    def __init__(self, config: DraftConfig, index: int, rope: Any) -> None:
        # Attention is as wide as the state in every layer, which is EAGLE-3's shape of its later ones.
        super().__init__(config, index + 1, rope)
        self.fuses = index == 0
        if self.fuses:
            del self.input_layernorm
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def enter(self, embeds: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.fuses:
            return super().enter(embeds, hidden, residual)
        x = project(torch.cat((embeds, hidden), -1), self.fc)
        return x, x


class Eagle1Drafter(Drafter):
    """One or a few Llama layers over the target's final states."""

    title = "EAGLE-1/2"
    method = "eagle"
    reads = "final"
    own_head = False
    reducible = False
    feature_weight = 1.0
    wide_activations = 8  # no norm before attention, none at the end

    def __init__(self, config: DraftConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        if config.layer != "llama":
            raise ConfigError(
                f"algorithm eagle1 with layer {config.layer!r}; vLLM has it for layer llama only"
            )
        super().__init__(config, compute_dtype)
        rope = Eagle1Layer.rope_for(config)
        self.layers = nn.ModuleList(Eagle1Layer(config, i, rope) for i in range(config.num_layers))

    def start(self, generator: torch.Generator) -> None:
        """Begin with the state passed through: the first guess is that the next state is this one."""
        init_weights(self, generator)
        size = self.config.hidden_size
        self.layers[0].fc.weight.data[:, size:] += torch.eye(size)

    def combine(self, states: Tensor) -> Tensor:
        """First-step input ``[n, H]`` from final states ``[n, 1, H]``."""
        return F.dropout(states[:, 0].to(self.compute_dtype), self.input_dropout, self.training)

    def feed(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """State and embedding of the next draft step."""
        return state, self.embed(tokens)

    def finish(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(state for the head, state fed to the next draft step)``: the same."""
        stream = residual + hidden
        return stream, stream

    def chains(self, batch: Any, steps: int) -> Chains:
        return unroll(self, batch, steps)

    def propose(self, states: Tensor, tokens: Tensor, *, steps: int, first_position: int = 0) -> Tensor:
        return propose(self, states, tokens, steps=steps, first_position=first_position)

    def feature_loss(self, hidden: Tensor, final: Tensor) -> Tensor:
        """Smooth L1 distance, the mean over channels."""
        return F.smooth_l1_loss(hidden.float(), final.float(), reduction="none").mean(-1)

    @classmethod
    def recognises(cls, config: dict[str, Any]) -> bool:
        architecture = str((config.get("architectures") or [""])[0])
        return architecture.startswith("Eagle") and not architecture.startswith("Eagle3")

    @classmethod
    def engine_config(cls, draft: DraftConfig, facts: dict[str, Any]) -> dict[str, Any]:
        for name in (
            "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "norm_before_residual",
            "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids", "eagle_config",
        ):  # fmt: skip
            facts.pop(name, None)
        return {**facts, "architectures": ["EagleLlamaForCausalLM"]}

    def engine_tensors(self) -> dict[str, Tensor]:
        return {
            name.replace("layers.0.fc.", "fc."): value
            for name, value in self.state_dict().items()
            if name not in ("d2t", "lm_head.weight")
        }

    @classmethod
    def own_names(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {("layers.0." + name if name.startswith("fc.") else name): t for name, t in tensors.items()}
