"""Small drafters, documents and stores for the trainer's tests."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from specdec_trainer.algorithms import ALGORITHMS
from specdec_trainer.batch import Document
from specdec_trainer.drafter import Drafter
from specdec_trainer.loss import TeacherHead
from specdec_trainer.model import DraftConfig, init_weights

VOCAB, HIDDEN, LAYERS = 23, 8, (1, 2, 3)


def make_config(**changes) -> DraftConfig:
    values = {
        "hidden_size": HIDDEN, "intermediate_size": 12,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
        "rms_norm_eps": 1e-5, "rope": {"rope_type": "default", "rope_theta": 1000.0},
        "max_position_embeddings": 512, "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
        "aux_layer_ids": LAYERS,
    }  # fmt: skip
    return DraftConfig(**{**values, **changes})


@dataclass
class Parts:
    model: Drafter
    teacher: TeacherHead
    embed: torch.Tensor
    target_head: torch.Tensor
    draft_ids: torch.Tensor | None


def make_parts(seed: int = 0, *, dtype: torch.dtype = torch.float64, **changes) -> Parts:
    """A drafter with random weights, its teacher head and the target's tables."""
    config = make_config(**changes)
    g = torch.Generator().manual_seed(seed)
    model = ALGORITHMS[config.algorithm](config, compute_dtype=dtype).to(dtype)
    init_weights(model, g, std=0.4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(1 + 0.3 * torch.randn(p.shape, generator=g))
            elif name.startswith("lm_head"):
                p.copy_(torch.randn(p.shape, generator=g))
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=g, dtype=dtype)
    head = torch.randn(config.vocab_size, config.hidden_size, generator=g, dtype=dtype)
    model.embed_weight = embed
    draft_ids = None
    if config.draft_vocab_size < config.vocab_size:
        order = torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size]
        draft_ids = order.sort().values
        model.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    return Parts(model, TeacherHead(head, draft_ids), embed, head, draft_ids)


def make_document(
    rng: np.random.Generator, rows: int, supervised: list[int], *, hidden: int = HIDDEN, num_aux: int = 3,
    vocab: int = VOCAB, first_position: int = 0, name: str = "r", without_final: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Document:  # fmt: skip
    weight = np.zeros(rows, dtype=np.float32)
    weight[supervised] = 1.0
    has_final = weight > 0
    has_final[list(without_final)] = False
    return Document(
        record_id=name,
        first_position=first_position,
        aux=torch.from_numpy(rng.standard_normal((rows, num_aux, hidden))).to(dtype),
        tokens=rng.integers(0, vocab, rows),
        labels=rng.integers(0, vocab, rows),
        weight=weight,
        final=torch.from_numpy(rng.standard_normal((int(has_final.sum()), hidden))).to(dtype),
        has_final=has_final,
    )


class FakeRecord:
    """A captured request held in memory, with the interface of ``specdec_tap.shards``."""

    def __init__(self, token_ids, spans, aux, final, *, gaps=(), final_span=None, id: str = "s/1/0") -> None:
        """``aux`` float ``[T-1, A, H]`` and ``final`` ``[T-1, H]`` cover every row; gaps hide some."""
        self.id = id
        self.token_ids = np.asarray(token_ids, dtype=np.int32)
        self.spans = [SimpleNamespace(start=a, stop=b, kind=k) for a, b, k in spans]
        self.num_tokens = len(self.token_ids)
        self.num_rows = self.num_tokens - 1
        self.gaps = list(gaps)
        self.removed_rows = 0
        if final_span is None:
            final_span = [(max(0, a - 1), b - 1) for a, b, k in spans if k == "response"]
        self.final_span = list(final_span)
        self._aux, self._final = np.asarray(aux, np.float32), np.asarray(final, np.float32)

    def aux(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._aux[start:stop].copy().view(np.uint32)

    def final(self, start: int, stop: int) -> np.ndarray:
        assert any(a <= start and stop <= b for a, b in self.final_span), (
            "asked for states that are not there"
        )
        return self._final[start:stop].copy().view(np.uint32)


class FakeStore(list):
    """A list of records with a header."""

    header = SimpleNamespace(dtype="float32", aux_layer_ids=LAYERS)


def random_record(
    rng, prompt: int, response: int, *, hidden: int = HIDDEN, vocab: int = VOCAB, **kw
) -> FakeRecord:
    total = prompt + response
    spans = [(0, prompt, "prompt"), (prompt, total, "response")] if prompt else [(0, total, "response")]
    return FakeRecord(
        rng.integers(0, vocab, total), spans,
        rng.standard_normal((total - 1, 3, hidden)), rng.standard_normal((total - 1, hidden)), **kw,
    )  # fmt: skip


TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def tiny_target(path, config: dict | None = None):
    """A checkpoint with just the tensors that training reads."""
    import json

    from safetensors.numpy import save_file

    config = TARGET_CONFIG if config is None else config
    rng = np.random.default_rng(0)
    shape = (config["vocab_size"], config["hidden_size"])
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {
            "model.embed_tokens.weight": rng.standard_normal(shape).astype(np.float32),
            "lm_head.weight": rng.standard_normal(shape).astype(np.float32),
            "model.norm.weight": np.ones(shape[1], np.float32),
        },
        path / "model.safetensors",
    )
    return path


def learnable_store(target_dir, records: int = 24, tokens: int = 30, *, seed: int = 0) -> FakeStore:
    """Sequences that follow one rule, with the states a confident target would have."""
    from specdec_tap.target import load_target

    target = load_target(target_dir)
    embed, head = target.embed.float32(), target.head.float32()
    vocab = target.vocab_size
    rng = np.random.default_rng(seed)
    store = FakeStore()
    for i in range(records):
        ids = [int(rng.integers(0, vocab))]
        while len(ids) < tokens:
            ids.append((ids[-1] * 7 + 3) % vocab)
        ids = np.array(ids)
        prompt = int(rng.integers(2, 6))
        aux = np.repeat(embed[ids[:-1], None], 3, axis=1)
        final = head[ids[1:]] * 0.7
        spans = [(0, prompt, "prompt"), (prompt, tokens, "response")]
        store.append(FakeRecord(ids, spans, aux, final, id=f"s/1/{i}"))
    return store
