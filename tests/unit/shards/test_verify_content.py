"""verify must catch wrong values, not only broken files: the faults of B02, B03 and B13, and a 1 % scale
error."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from shardkit import make_header

from specdec_tap.shards import Piece, RecordMeta, ShardWriter, Span, encode_block
from specdec_tap.shards.lossy import from_float
from specdec_tap.shards.verify import verify_shards

HIDDEN, VOCAB, LAYERS = 64, 400, 8
PROMPT, TOTAL = 20, 120


class FakeModel:
    """Residual states, a real RMS norm with weights far from 1, and a head: all that verify looks at."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.embed = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
        self.head = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
        self.norm = rng.uniform(0.2, 3.0, HIDDEN).astype(np.float32)

    def save(self, path: Path) -> str:
        from safetensors.numpy import save_file

        path.mkdir(parents=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "num_hidden_layers": LAYERS,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        }
        (path / "config.json").write_text(json.dumps(config))
        tensors = {
            "model.embed_tokens.weight": self.embed,
            "lm_head.weight": self.head,
            "model.norm.weight": self.norm,
        }
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return hashlib.sha256((path / "config.json").read_bytes()).hexdigest()

    def post_norm(self, residual: np.ndarray) -> np.ndarray:
        rms = np.sqrt((residual**2).mean(axis=-1, keepdims=True) + 1e-6)
        return residual / rms * self.norm

    def request(self, temperature: float):
        """tokens [T], aux [A, T-1, H], residual before the norm [T-1, H]; tokens follow from the residual."""
        rng = self.rng
        residual = rng.standard_normal((TOTAL - 1, HIDDEN)).astype(np.float32) * 4
        logits = self.post_norm(residual) @ self.head.T / 8
        tokens = rng.integers(0, VOCAB, TOTAL)
        for t in range(PROMPT - 1, TOTAL - 1):
            if temperature == 0:
                tokens[t + 1] = logits[t].argmax()
            else:
                p = np.exp((logits[t] - logits[t].max()) / temperature)
                tokens[t + 1] = rng.choice(VOCAB, p=p / p.sum())
        noise = rng.standard_normal((3, TOTAL - 1, HIDDEN)).astype(np.float32)
        aux = self.embed[tokens[:-1]][None] * np.array([2.0, 0.5, 0.2])[:, None, None] + noise * 2
        return tokens.astype(np.int32), aux.astype(np.float32), residual


def write(
    root,
    *,
    temperature=0.0,
    fault=lambda tokens, aux, final: (tokens, aux, final),
    requests=6,
    sampling=None,
    **header,
):
    """Write requests of a fake model, the fault applied to what is stored; returns the report."""
    model = FakeModel()
    # The head works on logits / 8, so store it scaled; the numbers above are what verify recomputes.
    model_dir = root / "model"
    stored = FakeModel()
    stored.head = model.head / 8
    sha = stored.save(model_dir)
    shard_header = make_header(
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        config_sha256=sha,
        aux_layer_ids=(2, 4, 5),
        **header,
    )
    with ShardWriter(root / "shards", shard_header) as writer:
        for number in range(requests):
            tokens, aux, residual = model.request(temperature)
            tokens, aux, final = fault(tokens, aux, model.post_norm(residual))
            if shard_header.final_hidden == "pre_norm":
                final = residual
            pieces = []
            for start in range(0, TOTAL - 1, 64):
                stop = min(start + 64, TOTAL - 1)
                first = max(start, PROMPT - 1)
                payload = encode_block(
                    shard_header,
                    position=start,
                    aux=from_float(np.ascontiguousarray(aux[:, start:stop]), shard_header.dtype),
                    final=from_float(np.ascontiguousarray(final[first:stop]), shard_header.dtype),
                    final_row=first - start,
                )
                pieces.append(Piece(start, writer.append_block(payload), 0, stop - start))
            writer.append_record(
                RecordMeta(
                    request_id=str(number),
                    token_ids=tokens,
                    spans=(Span(0, PROMPT, "prompt"), Span(PROMPT, TOTAL, "response")),
                    pieces=tuple(pieces),
                    finish_reason="length",
                    started_unix_s=0.0,
                    finished_unix_s=1.0,
                    sampling={"temperature": temperature, "top_p": 1.0} | (sampling or {}),
                )
            )
    return verify_shards(root / "shards", target_dir=model_dir)


def codes(report):
    return {f.code for f in report.findings if f.level == "error"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_right_states_pass(tmp_path, dtype, temperature):
    report = write(tmp_path, temperature=temperature, dtype=dtype)
    assert report.ok, report.findings
    assert abs(report.content["norm_rms_median"] - 1) < 1e-3
    if temperature == 0:
        assert report.content["greedy_agreement"] == 1.0
    else:
        assert abs(report.content["sampled_z"]) < 4
    alignment = report.content["token_alignment"]
    assert alignment["cosine_own"] > 0.3 > abs(alignment["cosine_previous"]) + 0.2


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_right_states_pass_through_a_lossy_codec(tmp_path, codec):
    report = write(tmp_path, codec=codec)
    assert codes(report) <= {"tokens_disagree"}  # 1 % of noise may flip near ties of random logits
    assert abs(report.content["norm_rms_median"] - 1) < 3e-3


def test_right_pre_norm_states_pass(tmp_path):
    assert write(tmp_path, final_hidden="pre_norm", dtype="float32").ok


@pytest.mark.parametrize("scale", [1.01, 0.99])
def test_a_scale_error_of_one_percent_is_caught(tmp_path, scale):
    report = write(tmp_path, fault=lambda tokens, aux, final: (tokens, aux, final * scale))
    assert codes(report) == {"norm_mismatch"}
    assert f"scaled by {scale:.2f}" in report.findings[0].message


def test_a_missing_norm_is_caught(tmp_path):
    """B03: un-normed states fed to the head as if they were normed."""
    model = FakeModel()

    def undo(tokens, aux, final):
        return tokens, aux, final / model.norm * 4

    assert "norm_mismatch" in codes(write(tmp_path, fault=undo))


def test_the_state_of_the_layer_below_is_caught(tmp_path):
    """B02: normed, so its size is right, but it is not what the head saw."""
    model = FakeModel()

    def layer_below(tokens, aux, final):
        noise = np.random.default_rng(5).standard_normal(final.shape).astype(np.float32)
        return tokens, aux, model.post_norm(final / model.norm + 0.7 * noise)

    assert codes(write(tmp_path, fault=layer_below)) == {"tokens_disagree"}
    report = write(tmp_path / "sampled", temperature=1.0, fault=layer_below, requests=20)
    assert "tokens_improbable" in codes(report)


def test_96_percent_agreement_is_a_failure(tmp_path):
    """B13: right on 96 % of positions, so nobody noticed."""
    rng = np.random.default_rng(6)

    def four_percent(tokens, aux, final):
        wrong = rng.permutation(np.arange(PROMPT - 1, TOTAL - 1))[:4]
        final = final.copy()
        final[wrong] = -final[wrong]
        return tokens, aux, final

    report = write(tmp_path, fault=four_percent)
    assert codes(report) == {"tokens_disagree"}
    assert 0.95 < report.content["greedy_agreement"] < 0.97


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_final_states_shifted_by_a_token_are_caught(tmp_path, temperature):
    report = write(
        tmp_path,
        temperature=temperature,
        fault=lambda tokens, aux, final: (tokens, aux, np.roll(final, 1, axis=0)),
        requests=12,
    )
    assert codes(report) == {"tokens_disagree" if temperature == 0 else "tokens_improbable"}


@pytest.mark.parametrize("by", [1, -1])
def test_aux_states_shifted_by_a_token_are_caught(tmp_path, by):
    report = write(
        tmp_path, fault=lambda tokens, aux, final: (tokens, np.roll(aux, by, axis=1), final), requests=8
    )
    assert codes(report) == {"shifted_tokens"}


def test_not_finite_zero_and_repeated_rows_are_caught(tmp_path):
    def spoil(tokens, aux, final):
        aux = aux.copy()
        aux[1, 7, 3] = np.nan
        aux[2, 9] = 0
        aux[:, 41] = aux[:, 40]
        return tokens, aux, final

    report = write(tmp_path, fault=spoil, dtype="float32")
    assert codes(report) == {"not_finite", "zero_row", "repeated_row"}


def test_requests_with_penalties_are_counted_not_judged(tmp_path):
    """Their tokens do not follow from the head alone, so tokens that disagree with it prove nothing."""

    def other_tokens(tokens, aux, final):
        tokens = tokens.copy()
        tokens[PROMPT:] = (tokens[PROMPT:] + 1) % VOCAB
        return tokens, aux, final

    report = write(tmp_path / "penalty", fault=other_tokens, sampling={"repetition_penalty": 1.2})
    assert "tokens_disagree" not in codes(report) and report.content["records_not_judged"] == 6
    assert any("penalties" in note for note in report.not_checked)
    neutral = write(tmp_path / "neutral", fault=other_tokens, sampling={"repetition_penalty": 1.0})
    assert "tokens_disagree" in codes(neutral) and neutral.content["records_not_judged"] == 0


def test_without_a_target_the_report_says_what_was_not_proven(tmp_path):
    write(tmp_path)
    report = verify_shards(tmp_path / "shards")
    assert report.ok and any("needs the target's head" in note for note in report.not_checked)
    assert report.counts["warning no_target"] == 1


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    """A Hugging Face llama with norm weights far from 1, and its states of a few requests."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        vocab_size=200,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.2, 3.0)
    path = tmp_path_factory.mktemp("llama") / "model"
    model.save_pretrained(path)
    requests = []
    for seed in range(2):
        ids = torch.randint(0, 200, (60,), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            out = model.model(ids[None, :-1], output_hidden_states=True)
        requests.append(
            (
                ids.numpy().astype(np.int32),
                np.stack([out.hidden_states[i][0].numpy() for i in range(6)]),
                out.last_hidden_state[0].numpy(),
            )
        )
    return path, requests


def write_reference(root, tiny_llama, fault):
    path, requests = tiny_llama
    header = make_header(
        hidden_size=64,
        vocab_size=200,
        num_hidden_layers=6,
        dtype="float32",
        aux_layer_ids=(2, 3),
        final_scope="all",
        config_sha256=hashlib.sha256((path / "config.json").read_bytes()).hexdigest(),
    )
    with ShardWriter(root, header) as writer:
        for tokens, states, final in requests:
            aux, final = fault(states, final)
            payload = encode_block(
                header,
                position=0,
                aux=np.ascontiguousarray(aux, np.float32).view(np.uint32),
                final=np.ascontiguousarray(final, np.float32).view(np.uint32),
            )
            ref = writer.append_block(payload)
            writer.append_record(
                RecordMeta(
                    request_id="r",
                    token_ids=tokens,
                    spans=(Span(0, 60, "prompt"),),
                    pieces=(Piece(0, ref, 0, 59),),
                    finish_reason="stop",
                    started_unix_s=0.0,
                    finished_unix_s=0.0,
                    sampling={},
                )
            )
    return verify_shards(root, reference=path, content_rows=0)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda h, f: (h[[2, 3]], f), set()),
        (lambda h, f: (h[[1, 3]], f), {"wrong_state"}),
        (lambda h, f: (h[[2, 4]], f), {"wrong_state"}),
        (lambda h, f: (h[[2, 3]] * 1.01, f), {"values_differ", "wrong_scale"}),
        (lambda h, f: (np.roll(h[[2, 3]], 1, axis=1), f), {"wrong_state"}),
        (lambda h, f: (h[[2, 3]], f * 1.01), {"values_differ", "wrong_scale"}),
        (lambda h, f: (h[[2, 3]], h[5]), {"wrong_state"}),
    ],
    ids=["right", "layer below", "layer above", "aux x 1.01", "shifted", "final x 1.01", "final of a layer"],
)
def test_a_reference_forward_catches_wrong_layers_scales_and_shifts(tmp_path, tiny_llama, fault, expected):
    report = write_reference(tmp_path, tiny_llama, fault)
    assert codes(report) == expected
