"""Turns of one conversation are trained once, whatever number of requests captured them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reference import Reference, reference_loss
from specdec_trainer import data, inputs
from specdec_trainer.algorithms import ALGORITHMS
from specdec_trainer.batch import pack
from specdec_trainer.config import TrainConfig
from specdec_trainer.conversations import ConversationStore
from specdec_trainer.objective import Eagle3Objective
from specdec_trainer.run import run
from specdec_trainer.runlog import read_log
from trainer_fakes import HIDDEN, LAYERS, VOCAB, FakeRecord, FakeStore, make_parts, tiny_target

from specdec_tap.shards import (
    Piece,
    RecordMeta,
    ShardHeader,
    ShardWriter,
    Span,
    TargetInfo,
    encode_block,
    open_shards,
)

PROMPTS = 1.0
"""Prompt weight of shards captured with final_hidden: all."""


class Chat:
    """Requests on one target whose states depend on the tokens up to each position, as a model's do."""

    def __init__(self, folder: Path, *, hidden: int = HIDDEN, vocab: int = VOCAB, scope: str = "all") -> None:
        info = TargetInfo(
            name="tiny", revision=None, architecture="LlamaForCausalLM", model_type="llama",
            num_hidden_layers=8, hidden_size=hidden, vocab_size=vocab, config_sha256="0" * 64,
            tokenizer_sha256=None, quantization=None,
        )  # fmt: skip
        self.header = ShardHeader(
            stream="chat", shard=0, created_unix_s=0.0, target=info, aux_layer_ids=LAYERS,
            final_hidden="post_norm", final_scope=scope, dtype="float32", codec="lossless",
            engine={"vllm": "none"},
        )  # fmt: skip
        self.folder, self.writer = folder, ShardWriter(folder, self.header)

    def states(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """aux ``[T-1, A, H]``, final ``[T-1, H]``."""
        size = self.header.target.hidden_size
        rows = [
            np.random.default_rng(tokens[: t + 1].tolist()).standard_normal((4, size), np.float32)
            for t in range(len(tokens) - 1)
        ]
        both = np.stack(rows)
        return both[:, :3], both[:, 3]

    def request(self, tokens: np.ndarray, prompt: int, lora: str | None = None) -> None:
        aux, final = (x.view(np.uint32) for x in self.states(tokens))
        first = 0 if self.header.final_scope == "all" else prompt - 1
        pieces = []
        for start in range(0, len(aux), self.header.block_tokens):
            stop = min(start + self.header.block_tokens, len(aux))
            kept = max(start, first)
            payload = encode_block(
                self.header, position=start, aux=aux[start:stop].transpose(1, 0, 2), final=final[kept:stop],
                final_row=kept - start,
            )  # fmt: skip
            pieces.append(Piece(start, self.writer.append_block(payload), 0, stop - start))
        spans = (Span(0, prompt, "prompt"), Span(prompt, len(tokens), "response"))[
            : 1 + (prompt < len(tokens))
        ]
        self.writer.append_record(
            RecordMeta(
                request_id="r", token_ids=np.asarray(tokens, np.int32), spans=spans, pieces=tuple(pieces),
                finish_reason="stop", started_unix_s=1.0, finished_unix_s=2.0, sampling={}, lora=lora,
            )
        )  # fmt: skip

    def close(self) -> ConversationStore:
        self.writer.close()
        return ConversationStore(open_shards(self.folder))


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def survey_of(store, prompt_weight: float = PROMPTS, vocab: int = VOCAB) -> data.Survey:
    return data.survey(
        store, range(len(store)), vocab_size=vocab, max_length=10_000, prompt_weight=prompt_weight
    )


@pytest.mark.parametrize("scope", ["all", "response"])
def test_two_turns_train_what_one_sequence_with_both_answers_trains(tmp_path: Path, scope: str) -> None:
    """Values and gradients against the reference on the whole conversation, and each token counted once."""
    tokens, weight = tokens_of(26), PROMPTS if scope == "all" else 0.0
    chat = Chat(tmp_path, scope=scope)
    chat.request(tokens[:14], 6)
    chat.request(tokens, 19)
    joined = chat.close()
    aux, final = chat.states(tokens)
    spans = [(0, 6, "prompt"), (6, 14, "response"), (14, 19, "prompt"), (19, 26, "response")]
    whole = FakeRecord(tokens, spans, aux, final, final_span=[(0, 25)] if scope == "all" else None)

    found, truth = survey_of(joined, weight), survey_of(FakeStore([whole]), weight)
    assert found.supervised == truth.supervised == (24 if scope == "all" else 8 + 7)
    assert (found.records, found.generated, len(found.stretches)) == (2, 15, 1)
    assert np.array_equal(found.counts, truth.counts)

    parts = make_parts(dtype=torch.float64, norm_before_residual=True)
    parts.model.train()
    batch = pack([data.load_document(joined, s, prompt_weight=weight) for s in found.stretches])
    total = Eagle3Objective(parts.model, parts.teacher, steps=3, decay=0.7).loss(batch).total
    total.backward()
    weights = {n: p.detach().clone().requires_grad_() for n, p in parts.model.named_parameters()}
    expected, _, _ = reference_loss(
        Reference(weights, parts.model.config, parts.embed),
        [data.load_document(FakeStore([whole]), truth.stretches[0], prompt_weight=weight)],
        parts.target_head, None, steps=3, decay=0.7,
    )  # fmt: skip
    expected.backward()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for name, parameter in parts.model.named_parameters():
        grad = weights[name].grad
        # The rotary table is float32.
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()))


def test_a_fork_trains_the_shared_turn_once(tmp_path: Path) -> None:
    """Two users go on from one answer, one of them twice: the union of tokens, context everywhere."""
    shared, chat = tokens_of(14), Chat(tmp_path)
    left = np.concatenate([shared, tokens_of(10, 1)])
    right = np.concatenate([shared, tokens_of(12, 2)])
    farther = np.concatenate([right, tokens_of(9, 3)])
    for sequence, prompt in ((farther, 30), (shared, 5), (left, 18), (right, 19)):
        chat.request(sequence, prompt)
    store = chat.close()
    assert [(g.records, g.known_tokens) for g in store.groups] == [((3, 0), 14), ((1, 2), 0)]
    survey = survey_of(store)
    assert survey.supervised == (14 - 2) + 10 + (12 + 9)
    assert (survey.records, survey.generated) == (4, 9 + 7 + 5 + 6)
    branch = data.load_document(store, survey.stretches[0], prompt_weight=PROMPTS)
    assert np.flatnonzero(branch.weight).tolist() == list(range(12, 33))
    np.testing.assert_array_equal(branch.aux.numpy(), chat.states(farther)[0])
    # All branches are of one conversation, and fall on one side of the split.
    assert len({data.conversation_hash(store[i]) for i in range(2)}) == 1
    assert data.conversation_hash(store[0]) == data.conversation_hash(store.store[1])


def test_adapters_repeats_and_strangers(tmp_path: Path) -> None:
    """Other weights give other states; the same request twice is trained once; a common start joins
    nothing."""
    tokens, chat = tokens_of(30), Chat(tmp_path)
    chat.request(tokens[:12], 4, lora="a")
    chat.request(tokens, 20)
    chat.request(tokens, 20)
    chat.request(np.concatenate([tokens[:11], tokens_of(8, 5)]), 12)
    chat.request(tokens[:2], 2)  # no answer, and all begin so: says nothing about who belongs together
    store = chat.close()
    assert [g.records for g in store.groups] == [(0,), (4, 1, 2), (3,)]
    assert len({data.conversation_hash(store[i]) for i in range(3)}) == 3
    assert survey_of(store).supervised == 10 + 28 + 17


def test_records_that_lost_a_part_join_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_tap.shards.reader import Record

    tokens, chat = tokens_of(30), Chat(tmp_path)
    chat.request(tokens[:12], 4)
    chat.request(tokens[:20], 15)
    chat.request(tokens, 24)
    monkeypatch.setattr(Record, "removed_rows", property(lambda r: 3 if r.num_tokens == 20 else 0))
    assert [g.records for g in chat.close().groups] == [(0, 2), (1,)]


def test_final_states_as_input_are_joined_too(tmp_path: Path) -> None:
    tokens, chat = tokens_of(26), Chat(tmp_path)
    chat.request(tokens[:14], 6)
    chat.request(tokens, 19)
    view = inputs.view(chat.close(), ALGORITHMS["medusa"])
    (stretch,) = survey_of(view).stretches
    document = data.load_document(view, stretch, prompt_weight=PROMPTS)
    np.testing.assert_array_equal(document.aux[:, 0].numpy(), chat.states(tokens)[1])


def test_a_run_counts_each_token_of_a_conversation_once(tmp_path: Path) -> None:
    """A whole run over chats of three turns."""
    target = tiny_target(tmp_path / "model")
    chat = Chat(tmp_path / "shards", hidden=16, vocab=40)
    for seed in range(8):
        tokens = np.random.default_rng(seed).integers(0, 40, 40).astype(np.int32)
        for stop, prompt in ((15, 8), (27, 20), (40, 30)):
            chat.request(tokens[:stop], prompt)
    chat.close()
    settings = {"epochs": 1, "ttt_steps": 2, "dtype": "float32", "held_out": 0.0, "batch_tokens": 80}
    result = run(
        TrainConfig(**settings), tmp_path / "shards", out=tmp_path / "run", target_path=target,
        tensorboard=False,
    )  # fmt: skip
    counted = next(x for x in read_log(tmp_path / "run") if x["kind"] == "start")["training"]
    assert counted["records"] == 24
    assert counted["supervised_tokens"] == 8 * 38
    assert counted["generated_tokens"] == 8 * (7 + 7 + 10)
    assert result.state.tokens == 8 * 39
