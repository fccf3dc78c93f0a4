"""Do the stored numbers mean what the records say? Judged with the target's own head, norm and embedding.

* A state behind an RMS norm has, divided by the norm's weight, a root mean square of exactly 1. That
catches a
  missing norm and a scale error of well under 1 %, which no comparison of tokens can.
* ``lm_head(final)`` must give the tokens the server sampled. Greedy requests: the token must be the argmax,
within
  the rounding of the logits. Sampled requests: the surprise of the tokens must match the entropy of the
  distributions, summed over all positions (a one-sided z test, because top-p and top-k only make tokens less
  surprising).
* Aux states of a low layer still resemble the embedding of the token at their position; if they resemble the
  embedding of a neighbour more, tokens and states are shifted against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SpecdecTapError
from .layout import FOREIGN_ANSWER_FLAGS
from .lossy import to_float
from .reader import Record, ShardStore

if TYPE_CHECKING:
    from ..target import Target, TensorRef
    from .verify import VerifyReport

# Logits are computed in the model's dtype, so two tokens within this many units in the last place of the
# largest logit are a tie that the server may have broken either way. Measured on SmolLM2 in bfloat16: every
# greedy token of vLLM lies within 1.4 units, and with the state of the layer below 40 % lie outside 2.
_TIE_ULPS = 2.0
_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 17}
"""float32: GEMM summation order matters more than the last place."""

_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

_MIN_AGREEMENT = 0.99
_MIN_Z = -5.0
_NORM_TOLERANCE = {"lossless": 0.004, "fp8": 0.006, "int8": 0.006}
_ROW_TOLERANCE = 0.02
_SHIFT_Z = 6.0
_VOCAB_CHUNK = 8192
_ROW_CHUNK = 512

# Settings that change the distribution after the head; a request that uses one cannot be judged by the head
# alone.
_NEUTRAL = {
    "presence_penalty": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "min_tokens": (0, None),
    "logit_bias": (None, "", 0),
    "allowed_token_ids": (None, "", 0),
    "bad_words": (None, "", 0),
    "structured_outputs": (None, "", 0, False),
}


@dataclass(slots=True)
class _LogitStats:
    """Per row, from one pass over the vocabulary."""

    top: np.ndarray
    """Largest logit, and its token."""
    argmax: np.ndarray
    chosen: np.ndarray
    """Logit of the sampled token."""
    rank: np.ndarray
    """How many tokens have a larger logit."""
    log_z: np.ndarray
    """Log-sum-exp at the row's temperature."""
    mean: np.ndarray
    """Expected log-probability (minus the entropy) and its variance at the row's temperature."""
    variance: np.ndarray


class ContentChecker:
    """One run of the content proofs over a store; results go into the report."""

    def __init__(
        self,
        store: ShardStore,
        report: VerifyReport,
        target: Target,
        max_rows: int,
        tell: Callable[[str, int, int], None],
    ) -> None:
        self._store = store
        self._report = report
        self._target = target
        self._max_rows = max_rows
        self._tell = tell
        self._header = store.header
        self._greedy = [0, 0]
        self._sampled = [0, 0.0, 0.0, 0.0]
        self._chosen_prob = 0.0
        self._rank = 0
        self._rms: list[np.ndarray] = []
        self._not_judged = 0
        self._foreign = 0

    def run(self) -> None:
        """Run every proof that the stored data allows."""
        if self._header.final_hidden != "none":
            self._check_finals()
        else:
            self._report.not_checked.append("that final states produce the sampled tokens: none are stored")
        if self._header.num_aux:
            self._check_shift()

    # ---- final states

    def _check_finals(self) -> None:
        done = 0
        for record, start, stop in self._chosen_ranges():
            self._tell("content", done, self._max_rows)
            try:
                final = record.final_float(start, stop)
            except SpecdecTapError:
                continue  # reported as lost_block or bad_block before
            done += stop - start
            self._check_record(record, start, final)
        self._report.counts["num_content_rows"] += done
        self._finish(done)

    def _chosen_ranges(self) -> Iterator[tuple[Record, int, int]]:
        """Ranges of positions with final states that produced sampled tokens, from records spread evenly."""
        left = self._max_rows
        for number in _spread(len(self._store)):
            if left <= 0:
                return
            try:
                record = self._store[number]
                held = record.final_span
            except SpecdecTapError:
                continue
            for span in record.spans:
                if span.kind != "response":
                    continue
                for a, b in held:
                    start, stop = max(a, span.start - 1, 0), min(b, span.stop - 1)
                    if start < stop and left > 0:
                        stop = min(stop, start + max(left, 64))
                        left -= stop - start
                        yield record, start, stop

    def _check_record(self, record: Record, start: int, final: np.ndarray) -> None:
        final = self._post_norm(record, start, final)
        if final is None:
            return
        tokens = record.token_ids[start + 1 : start + 1 + len(final)]
        sampling = record.meta.sampling
        if FOREIGN_ANSWER_FLAGS & set(record.meta.flags):
            self._foreign += 1
            return
        if any(name in sampling and sampling[name] not in ok for name, ok in _NEUTRAL.items()):
            self._not_judged += 1
            return
        temperature = sampling.get("temperature", 1.0)
        temperature = 1.0 if not isinstance(temperature, int | float) else float(temperature)
        greedy = temperature < 1e-5
        if int(tokens.max(initial=0)) >= self._target.vocab_size:
            return  # reported as token_out_of_vocab
        stats = self._logits(final, tokens, 1.0 if greedy else temperature)
        self._chosen_prob += float(
            np.exp(stats.chosen / (1.0 if greedy else temperature) - stats.log_z).sum()
        )
        self._rank += int(stats.rank.sum())
        if greedy:
            self._judge_greedy(record, start, stats)
        else:
            surprise = stats.chosen / temperature - stats.log_z - stats.mean
            self._judge_sampled(record, surprise, stats.variance)

    def _judge_greedy(self, record: Record, start: int, stats: _LogitStats) -> None:
        ulp = np.exp2(
            np.floor(np.log2(np.maximum(np.abs(stats.top), 1e-6))) - _MANTISSA_BITS[self._header.dtype]
        )
        agrees = stats.top - stats.chosen <= _TIE_ULPS * ulp
        self._greedy[0] += int(agrees.sum())
        self._greedy[1] += len(agrees)
        # One miss proves nothing in a short record; it still counts in the sum over all records.
        if agrees.mean() < _MIN_AGREEMENT and (~agrees).sum() > 1:
            at = int(np.flatnonzero(~agrees)[0])
            self._report.add(
                "error",
                "tokens_disagree",
                record.id,
                f"lm_head(final) gives the greedy token at {agrees.mean():.1%} of {len(agrees):,} positions; "
                f"expected at least 99 %. First at position {start + at:,}: token "
                f"{int(stats.argmax[at])} instead "
                f"of {int(record.token_ids[start + at + 1])}",
            )

    def _judge_sampled(self, record: Record, surprise: np.ndarray, variance: np.ndarray) -> None:
        self._sampled[0] += len(surprise)
        self._sampled[1] += float(surprise.sum())
        self._sampled[2] += float(variance.sum())
        z = _z(float(surprise.sum()), float(variance.sum()), len(surprise))
        if len(surprise) >= 16 and z < _MIN_Z:
            self._report.add(
                "error",
                "tokens_improbable",
                record.id,
                f"the {len(surprise):,} sampled tokens are {-float(surprise.mean()):.2f} nats less "
                "likely than "
                f"lm_head(final) predicts of its own samples (z = {z:.1f}; expected above {_MIN_Z:.0f})",
            )

    def _finish(self, rows: int) -> None:
        content = self._report.content
        content["rows"] = rows
        content["records_not_judged"] = self._not_judged
        if self._foreign:
            self._report.not_checked.append(
                f"that final states produce the tokens of {self._foreign:,} imported or extracted records, "
                "whose answers may be another model's; compare with --reference MODEL_DIR"
            )
        if self._greedy[1]:
            agreement = self._greedy[0] / self._greedy[1]
            content["greedy_tokens"] = self._greedy[1]
            content["greedy_agreement"] = agreement
            if agreement < _MIN_AGREEMENT:
                self._report.add(
                    "error", "tokens_disagree", str(self._store.root), "lm_head(final) gives the greedy "
                    f"token at {agreement:.2%} of {self._greedy[1]:,} positions; expected at least 99 %",
                )  # fmt: skip
        if self._sampled[0]:
            count, surprise, variance, _ = self._sampled
            content["sampled_tokens"] = count
            content["sampled_surprise_nats"] = surprise / count
            content["sampled_z"] = z = _z(surprise, variance, int(count))
            if z < _MIN_Z:
                self._report.add(
                    "error", "tokens_improbable", str(self._store.root), f"sampled tokens are "
                    f"{-surprise / count:.3f} nats less likely than lm_head(final) predicts (z = {z:.1f})",
                )  # fmt: skip
        judged = self._greedy[1] + int(self._sampled[0])
        if judged:
            content["mean_probability"] = self._chosen_prob / judged
            content["mean_rank"] = self._rank / judged
        else:
            self._report.not_checked.append(
                "that final states produce the sampled tokens: no response position with a final "
                "state, or only "
                "requests with penalties or constraints"
            )
        if self._rms:
            rms = np.concatenate(self._rms)
            content["norm_rms_median"] = float(np.median(rms))
            content["norm_rms_min"], content["norm_rms_max"] = float(rms.min()), float(rms.max())

    def _post_norm(self, record: Record, start: int, final: np.ndarray) -> np.ndarray | None:
        """Final states as the head wants them, checked against the norm; None if they cannot be."""
        target = self._target
        if target.norm is None or target.norm_kind == "unknown":
            note = "the size of final states: the target's last norm is of an unknown kind"
            if note not in self._report.not_checked:
                self._report.not_checked.append(note)
            return final if self._header.final_hidden == "post_norm" else None
        weight = target.norm.float32()
        if target.norm_kind == "rms_one_plus":
            weight = weight + 1.0
        bias = target.norm_bias.float32() if target.norm_bias is not None else 0.0
        if self._header.final_hidden == "pre_norm":
            if target.norm_kind == "layer_norm":
                final = final - final.mean(axis=1, keepdims=True)
            scale = np.sqrt((final**2).mean(axis=1, keepdims=True) + target.norm_eps)
            return final / scale * weight + bias
        usable = np.abs(weight) > 1e-3 * np.median(np.abs(weight))
        if usable.mean() > 0.99:
            rms = np.sqrt((((final - bias) / np.where(usable, weight, np.inf)) ** 2).mean(axis=1))
            self._rms.append(rms)
            self._judge_norm(record, start, rms)
        return final

    def _judge_norm(self, record: Record, start: int, rms: np.ndarray) -> None:
        median = float(np.median(rms))
        off = np.flatnonzero(np.abs(rms - 1.0) > _ROW_TOLERANCE)
        tolerance = _NORM_TOLERANCE[record.header.codec]
        if abs(median - 1.0) > tolerance:
            hint = (
                f"they look scaled by {median:.4f}"
                if 0.5 < median < 2
                else "they look like states before the norm, or of another model"
            )
            self._report.add(
                "error",
                "norm_mismatch",
                record.id,
                f"final states divided by the norm's weight have a root mean square of {median:.4f}; "
                "expected "
                f"1 within {tolerance:.1%}: {hint}",
            )
        elif len(off):
            self._report.add(
                "error",
                "norm_mismatch",
                record.id,
                f"final state at position {start + int(off[0]):,} has a root mean square of "
                f"{float(rms[off[0]]):.3f} behind the norm's weight; expected 1 ({len(off):,} such rows)",
            )

    def _logits(self, final: np.ndarray, tokens: np.ndarray, temperature: float) -> _LogitStats:
        """Statistics of ``softmax(lm_head(final) / temperature)``, a slice of the vocabulary at a time."""
        rows = len(final)
        target = self._target
        vocab = target.head.shape[0]
        top = np.full(rows, -np.inf)
        argmax = np.zeros(rows, np.int64)
        chosen = (final * _rows_float(target.head, tokens)).sum(axis=1, dtype=np.float64)
        if target.head_bias is not None:
            chosen += target.head_bias.float32()[tokens]
        chosen = self._shape_logits(chosen)
        rank = np.zeros(rows, np.int64)
        s0, s1, s2 = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        shift = np.full(rows, -np.inf)
        for low in range(0, vocab, _VOCAB_CHUNK):
            head = _float(target.head, low, min(low + _VOCAB_CHUNK, vocab))
            for first in range(0, rows, _ROW_CHUNK):
                part = slice(first, first + _ROW_CHUNK)
                logits = final[part] @ head.T
                if target.head_bias is not None:
                    logits = logits + target.head_bias.float32()[low : low + len(head)]
                logits = self._shape_logits(logits)
                best = logits.argmax(axis=1)
                value = logits[np.arange(len(logits)), best].astype(np.float64)
                better = value > top[part]
                argmax[part] = np.where(better, best + low, argmax[part])
                top[part] = np.maximum(top[part], value)
                rank[part] += (logits > chosen[part, None].astype(np.float32)).sum(axis=1)
                scaled = logits / np.float32(temperature)
                peak = np.maximum(shift[part], value / temperature)
                weight = np.exp(scaled - peak[:, None].astype(np.float32))
                rescale = np.exp(np.where(np.isfinite(shift[part]), shift[part] - peak, -np.inf))
                s0[part] = s0[part] * rescale + weight.sum(axis=1, dtype=np.float64)
                s1[part] = s1[part] * rescale + (weight * scaled).sum(axis=1, dtype=np.float64)
                s2[part] = s2[part] * rescale + (weight * scaled * scaled).sum(axis=1, dtype=np.float64)
                shift[part] = peak
        log_z = shift + np.log(s0)
        mean_logit = s1 / s0
        variance = np.maximum(s2 / s0 - mean_logit**2, 0.0)
        return _LogitStats(top, argmax, chosen, rank, log_z, mean_logit - log_z, variance)

    def _shape_logits(self, logits: np.ndarray) -> np.ndarray:
        target = self._target
        if target.logit_scale != 1.0:
            logits = logits * logits.dtype.type(target.logit_scale)
        if target.logit_softcap:
            logits = target.logit_softcap * np.tanh(logits / target.logit_softcap)
        return logits

    # ---- aux states against tokens

    def _check_shift(self) -> None:
        """Compare aux states of the lowest layer with the embeddings of their token and its neighbours."""
        layer = self._header.aux_layer_ids[0]
        if layer > max(4, self._header.target.num_hidden_layers // 4):
            self._report.not_checked.append(
                f"that aux states belong to their tokens: the lowest aux layer, {layer}, no longer "
                "shows the token"
            )
            return
        states, here, before, after = [], [], [], []
        wanted = min(self._max_rows, 2048)
        for number in _spread(len(self._store)):
            if wanted <= 0:
                break
            try:
                record = self._store[number]
                for start, stop in _covered(record):
                    start, stop = max(start, 1), min(stop, start + wanted)
                    if stop - start < 2:
                        continue
                    states.append(record.aux_float(start, stop)[:, 0])
                    here.append(record.token_ids[start:stop])
                    before.append(record.token_ids[start - 1 : stop - 1])
                    after.append(record.token_ids[start + 1 : stop + 1])
                    wanted -= stop - start
            except SpecdecTapError:
                continue
        if sum(map(len, states)) < 64:
            self._report.not_checked.append("that aux states belong to their tokens: fewer than 64 positions")
            return
        _judge_shift(self._report, str(self._store.root), self._target, layer, np.concatenate(states),
                     *(np.concatenate(t) for t in (here, before, after)))  # fmt: skip


def _judge_shift(
    report: VerifyReport,
    where: str,
    target: Target,
    layer: int,
    states: np.ndarray,
    here: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
) -> None:
    if max(int(t.max()) for t in (here, before, after)) >= target.embed.shape[0]:
        return  # reported as token_out_of_vocab
    states = states - np.median(states, axis=0)
    states /= np.abs(states).mean(axis=0) + 1e-20
    states /= np.linalg.norm(states, axis=1, keepdims=True) + 1e-20
    ids, inverse = np.unique(np.concatenate([here, before, after]), return_inverse=True)
    rows = _rows_float(target.embed, ids)
    rows = rows - rows.mean(axis=0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) + 1e-20
    likeness = [(states * rows[part]).sum(axis=1) for part in np.split(inverse, 3)]
    result: dict[str, Any] = {"layer": layer, "positions": len(states)}
    result |= {
        f"cosine_{name}": float(v.mean())
        for name, v in zip(("own", "previous", "next"), likeness, strict=True)
    }
    report.content["token_alignment"] = result
    for name, other, tokens in (("previous", likeness[1], before), ("next", likeness[2], after)):
        differ = tokens != here
        gain = (other - likeness[0])[differ]
        if len(gain) < 64:
            continue
        z = float(gain.mean() / (gain.std() / np.sqrt(len(gain)) + 1e-20))
        if z > _SHIFT_Z:
            report.add(
                "error",
                "shifted_tokens",
                where,
                f"aux states of layer {layer} resemble the embedding of the {name} token more than "
                "that of their "
                f"own (cosine {other[differ].mean():.4f} and {likeness[0][differ].mean():.4f}, z = "
                f"{z:.0f}): tokens "
                "and states are shifted against each other",
            )


def _covered(record: Record) -> list[tuple[int, int]]:
    out, at = [], 0
    for start, stop in [*record.gaps, (record.num_rows, record.num_rows)]:
        if start > at:
            out.append((at, start))
        at = stop
    return out


def _spread(count: int) -> Iterator[int]:
    """0 .. count - 1, each once, in an order whose every beginning is spread evenly."""
    stride = 1 << max(count - 1, 0).bit_length()
    if count:
        yield 0
    while stride > 1:
        stride //= 2
        yield from range(stride, count, 2 * stride)


def _z(total: float, variance: float, count: int) -> float:
    """Standard score with a floor on the variance, so that near-certain tokens do not blow up rounding."""
    return total / float(np.sqrt(variance + 0.01 * count + 1e-12))


def _float(ref: TensorRef, start: int, stop: int) -> np.ndarray:
    return to_float(ref.bits(start, stop), _DTYPE_NAMES[ref.dtype])


def _rows_float(ref: TensorRef, rows: np.ndarray) -> np.ndarray:
    """float32 [len(rows), H] of single rows, without reading the whole tensor."""
    kind = np.dtype("<u4") if ref.dtype == "F32" else np.dtype("<u2")
    bits = np.memmap(ref.path, kind, "r", ref.offset, ref.shape)[rows]
    return to_float(np.asarray(bits), _DTYPE_NAMES[ref.dtype])
