"""From shards to packed batches: which rows train, in which order, decoded ahead of time.

The order is a pure function of ``(seed, epoch, documents)``, so a run resumes from two integers. Documents
are never padded and never cut to fit a pack; only one longer than ``max_length`` is split.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec_tap.errors import InputError, ShardError

from .batch import Batch, Document, pack


class Record(Protocol):
    """What the trainer reads of one captured request (``specdec_tap.shards`` implements it)."""

    id: str
    token_ids: np.ndarray
    spans: Sequence[Any]
    num_tokens: int
    num_rows: int
    gaps: list[tuple[int, int]]
    final_span: list[tuple[int, int]]
    removed_rows: int

    def aux(self, start: int = 0, stop: int | None = None) -> np.ndarray: ...
    def final(self, start: int, stop: int) -> np.ndarray: ...


class Store(Protocol):
    """A folder of shards."""

    header: Any

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Record: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows ``[start, stop)`` of record ``record`` that form one document."""

    record: int
    start: int
    stop: int
    supervised: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Survey:
    """What a set of records holds for training, and why the rest does not count."""

    stretches: list[Stretch] = field(default_factory=list)
    records: int = 0
    tokens: int = 0
    generated: int = 0
    supervised: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Response tokens without loss, by reason."""
    counts: np.ndarray | None = None
    """How often each token id is the prediction of a supervised row."""

    def add(self, other: Survey) -> None:
        """Add another survey's sums; its stretches are left out."""
        self.records += other.records
        self.tokens += other.tokens
        self.generated += other.generated
        self.supervised += other.supervised
        self.skipped.update(other.skipped)
        if self.counts is not None and other.counts is not None:
            self.counts += other.counts

    def explain(self) -> str:
        """One sentence of counts, for logs and errors."""
        reasons = ", ".join(f"{n:,} {why}" for why, n in self.skipped.most_common()) or "none"
        return (
            f"{self.records:,} records, {self.tokens:,} tokens, {self.generated:,} of them generated, "
            f"{self.supervised:,} supervised; left out: {reasons}"
        )


def survey(
    store: Store, indices: Sequence[int], *, vocab_size: int, max_length: int, prompt_weight: float = 0.0
) -> Survey:
    """Find the trainable stretches of some records; reads metadata only.

    Args:
        store: The shards.
        indices: Records to look at.
        vocab_size: Of the target; records with other ids are left out.
        max_length: Rows after which a document is split.
        prompt_weight: Above 0, prompt tokens are predicted too.
    """
    out = Survey(counts=np.zeros(vocab_size, dtype=np.int64))
    for index in indices:
        record = store[index]
        out.records += len(getattr(record, "records", (record,)))
        out.tokens += record.num_tokens
        ids = np.asarray(record.token_ids)
        generated = generated_mask(record)
        out.generated += int(generated.sum())
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            out.skipped["outside the target's vocabulary"] += int(generated.sum())
            continue
        if record.removed_rows:
            out.skipped["in records that lost a part with a removed shard"] += int(generated.sum())
            continue
        weight, _, reasons = row_weights(record, prompt_weight)
        out.skipped.update(reasons)
        for start, stop in stretches(record.num_rows, record.gaps, max_length):
            loss = weight[start:stop] > 0
            count = int(loss.sum())
            if count:
                out.stretches.append(Stretch(index, start, stop, count))
                out.supervised += count
                out.counts += np.bincount(ids[start + 2 :][np.flatnonzero(loss)], minlength=vocab_size)
    return out


def generated_mask(record: Record) -> np.ndarray:
    """Which tokens of a record the target generated, bool ``[T]``."""
    mask = np.zeros(record.num_tokens, dtype=bool)
    for span in record.spans:
        if span.kind == "response":
            mask[span.start : span.stop] = True
    return mask


def row_weights(record: Record, prompt_weight: float) -> tuple[np.ndarray, np.ndarray, Counter[str]]:
    """Loss weight of every row, whether it has a teacher, and why response tokens have no loss.

    Row t predicts token t+2, whose distribution is head(final[t+1]). A generated token is supervised when
    row t is captured and final[t+1] is too; a prompt token, when asked for, also without a teacher.
    """
    rows = record.num_rows
    generated = generated_mask(record)
    captured = np.ones(rows, dtype=bool)
    for start, stop in record.gaps:
        captured[start:stop] = False
    taught = np.zeros(rows + 1, dtype=bool)
    for start, stop in record.final_span:
        taught[start:stop] = True
    weight = np.zeros(rows, dtype=np.float32)
    has_final = np.zeros(rows, dtype=bool)
    reasons: Counter[str] = Counter()
    if rows >= 2:
        # Row t = 0..rows-2 predicts token t+2 = 2..rows.
        wanted, seen, final = generated[2:], captured[:-1], taught[1:rows]
        has_final[:-1] = final
        weight[:-1] = np.where(wanted & seen & final, 1.0, 0.0)
        if prompt_weight:
            weight[:-1] += np.where(~wanted & seen, np.float32(prompt_weight), np.float32(0.0))
        reasons["after rows that were not captured"] = int((wanted & ~seen).sum())
        reasons["without the target's final state"] = int((wanted & seen & ~final).sum())
    reasons["at the first two positions of a sequence"] = int(generated[:2].sum())
    if known := getattr(record, "known_tokens", 0):
        # Trained in another branch of the same conversation. No answer is lost: here these are prompt.
        weight[: max(0, known - 2)] = 0.0
    return weight, has_final, +reasons


def stretches(num_rows: int, gaps: Sequence[tuple[int, int]], max_length: int) -> Iterator[tuple[int, int]]:
    """Gap-free row ranges, split so that none is longer than ``max_length``."""
    at = 0
    for start, stop in [*gaps, (num_rows, num_rows)]:
        for begin in range(at, min(start, num_rows), max_length):
            yield begin, min(begin + max_length, start, num_rows)
        at = stop


def held_out(record: Record, fraction: float) -> bool:
    """Whether a record belongs to the held-out set.

    Decided by a hash of its first prompt, so that all turns of a conversation, and repeats of a prompt,
    fall on the same side, and that new records never move an old one.
    """
    return conversation_hash(record) < fraction


def conversation_hash(record: Record) -> float:
    """Uniform number in [0, 1) from the token ids before the first response."""
    first = getattr(record, "first_prompt", None)
    if first is None:
        first = next((s.start for s in record.spans if s.kind == "response"), record.num_tokens)
    prompt = np.ascontiguousarray(record.token_ids[: max(1, first)], dtype="<i4")
    digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def split(store: Store, fraction: float) -> tuple[list[int], list[int]]:
    """``(training, held-out)`` record indices; with two conversations or more neither is empty."""
    hashes = np.array([conversation_hash(store[i]) for i in range(len(store))])
    out = hashes < fraction
    if fraction > 0 and len(np.unique(hashes)) > 1:
        if not out.any():
            out = hashes == hashes.min()
        elif out.all():
            out = hashes < hashes.max()
    return np.flatnonzero(~out).tolist(), np.flatnonzero(out).tolist()


def load_document(
    store: Store, stretch: Stretch, *, prompt_weight: float = 0.0, columns: list[int] | None = None
) -> Document:
    """Read the states of one stretch; ``columns`` picks some of the captured layers."""
    record = store[stretch.record]
    start, stop = stretch.start, stretch.stop
    ids = np.asarray(record.token_ids)
    weight, has_final, _ = row_weights(record, prompt_weight)
    weight, has_final = weight[start:stop], has_final[start:stop] & (weight[start:stop] > 0)
    labels = np.full(stop - start, -1, dtype=np.int64)
    known = min(stop, record.num_tokens - 2) - start
    if known > 0:
        labels[:known] = ids[start + 2 : start + 2 + known]
    dtype = store.header.dtype
    runs = _runs(has_final)
    parts = [bits_to_torch(record.final(start + a + 1, start + b + 1), dtype) for a, b in runs]
    bits = record.aux(start, stop)
    aux = bits_to_torch(bits if columns is None else bits[:, columns], dtype)
    final = torch.cat(parts) if parts else aux.new_empty(0, aux.shape[-1])
    for name, values in (("aux", aux), ("final", final)):
        # A record that was damaged before it was stored would poison the whole run.
        if not bool(torch.isfinite(values).all()):
            raise InputError(
                f"record {record.id} holds {name} states that are not finite; run 'specdec-tap shards verify'"
            )
    return Document(
        record_id=record.id,
        first_position=start,
        aux=aux,
        tokens=ids[start + 1 : stop + 1],
        labels=labels,
        weight=weight,
        final=final,
        has_final=has_final,
    )


def bits_to_torch(bits: np.ndarray, dtype: str) -> Tensor:
    """Raw bits as numbers, without copying where the array allows it."""
    kind = "<i4" if dtype == "float32" else "<i2"
    array = np.ascontiguousarray(bits).view(kind)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).view(getattr(torch, dtype))


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def epoch_batches(
    documents: Sequence[Stretch], *, batch_tokens: int, seed: int, epoch: int, shuffle: bool = True
) -> list[list[int]]:
    """Indices into ``documents`` for every batch of one epoch, in order.

    A batch holds documents while their rows fit ``batch_tokens``; a longer document is a batch of its own.
    """
    order: Sequence[int] = range(len(documents))
    if shuffle:
        order = np.random.default_rng([seed, epoch]).permutation(len(documents)).tolist()
    out: list[list[int]] = []
    room = -1
    for i in order:
        size = documents[i].num_rows
        if size > room:
            out.append([])
            room = batch_tokens
        out[-1].append(i)
        room -= size
    return out


class Prefetcher:
    """Decodes the next batches in background threads, in order; few wait at once, so memory is bounded."""

    def __init__(
        self,
        make: Callable[[Any], Batch],
        items: Iterable[Any],
        *,
        workers: int = 1,
        depth: int | None = None,
    ) -> None:
        """Start decoding.

        Args:
            make: Makes the batch of one item.
            items: Taken one by one in a thread of their own, so that the next one may be waited for.
            workers: Batches decoded at a time.
            depth: Batches under way or done at once; one more than ``workers`` by default.
        """
        self._room = threading.Semaphore(workers + 1 if depth is None else depth)
        self._queue: queue.SimpleQueue[Future[Batch] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="specdec-trainer-data")
        self._feeder = threading.Thread(
            target=self._feed, args=(make, items), name="specdec-trainer-feed", daemon=True
        )
        self._feeder.start()

    def __iter__(self) -> Iterator[Batch]:
        while (future := self._queue.get()) is not None:
            batch = future.result()
            self._room.release()
            yield batch

    def close(self) -> None:
        """Stop decoding and forget what waits."""
        self._stop.set()
        self._room.release()
        self._feeder.join()
        self._pool.shutdown(cancel_futures=True)

    def _feed(self, make: Callable[[Any], Batch], items: Iterable[Any]) -> None:
        iterator = iter(items)
        while True:
            self._room.acquire()
            if self._stop.is_set():
                return
            try:
                item = next(iterator)
            except StopIteration:
                self._queue.put(None)
                return
            except Exception as err:
                # Raised in the training thread, which waits for this queue.
                failed: Future[Batch] = Future()
                failed.set_exception(err)
                self._queue.put(failed)
                return
            self._queue.put(self._pool.submit(make, item))


@dataclass(slots=True)
class Dataset:
    """Documents of one split and how to load them."""

    store: Store
    survey: Survey
    prompt_weight: float = 0.0
    columns: list[int] | None = None
    """Which of the captured layers are read; None for all."""
    bad_records: Counter[str] = field(default_factory=Counter)
    """How often something could not be read, by what was said; messages name the record."""
    greedy: dict[int, np.ndarray] = field(default_factory=dict)
    """Target's greedy tokens by document, filled as they become known."""
    centroid: dict[int, Tensor] = field(default_factory=dict)
    """Teacher's centroids by document, likewise."""
    cache_bytes: int = 0
    """Room left for centroids."""

    def load(self, indices: Sequence[int]) -> Batch:
        """Read and pack some documents of the survey; a damaged one is left out and counted.

        Where all are damaged another one takes their place: with several processes each must have a batch.

        Raises:
            InputError: No document of the survey can be read.
        """
        try:
            return self._exactly(indices)
        except InputError:
            count = len(self.survey.stretches)
            for number in range(indices[-1] + 1, indices[-1] + count):
                with contextlib.suppress(InputError):
                    return self._exactly([number % count])
            raise

    def _exactly(self, indices: Sequence[int]) -> Batch:
        return self.read([self.survey.stretches[i] for i in indices], indices)

    def read(self, stretches: Sequence[Stretch], keys: Sequence[int] = ()) -> Batch:
        """Read and pack documents.

        Args:
            stretches: At least one.
            keys: Their numbers in the survey, for what is remembered of them; or nothing.

        Raises:
            InputError: None of them can be read.
        """
        documents, key = [], []
        for i, stretch in enumerate(stretches):
            try:
                document = load_document(
                    self.store, stretch, prompt_weight=self.prompt_weight, columns=self.columns
                )
            except (ShardError, InputError) as err:
                self.bad_records[str(err)] += 1
                continue
            if keys:
                number = keys[i]
                document = replace(
                    document, greedy=self.greedy.get(number), centroid=self.centroid.get(number)
                )
                key.append(number)
            documents.append(document)
        if not documents:
            raise InputError(
                f"none of the {len(stretches):,} records of a batch can be read: "
                f"{next(iter(self.bad_records))}"
            )
        return pack(documents, tuple(key))

    def spread_out(self) -> Iterator[Batch]:
        """Documents one by one, in an order that visits the whole data set early, the same in every run; a
        damaged one is left out and counted.

        Raises:
            InputError: None of them can be read.
        """
        found, error = False, None
        for i in np.random.default_rng(0).permutation(len(self.survey.stretches)).tolist():
            try:
                batch = self._exactly([i])
            except InputError as err:
                error = err
                continue
            found = True
            yield batch
        if error is not None and not found:
            raise error

    def own_tokens(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Documents as ``(aux states [n, A, H], own token and the one before [n, 2])``, until they have
        ``rows`` rows."""
        for batch in self.spread_out():
            if rows <= 0:
                return
            if batch.num_rows > 2:
                # The token fed at row t is x[t+1], the own one of row t + 1.
                yield batch.aux[2:], torch.stack((batch.tokens[1:-1], batch.tokens[:-2]), 1)
                rows -= batch.num_rows - 2

    def remember(self, batch: Batch) -> None:
        """Keep what the target said about a used batch, so that it is worked out once.

        Greedy tokens take 4 bytes a token and are always kept, centroids only while they fit ``cache_bytes``.
        """
        if not batch.key or "greedy" not in batch.notes:
            return
        rows = batch.rows[batch.taught].cpu().numpy()
        ends = np.searchsorted(rows, np.append(batch.starts.numpy(), batch.num_rows)).tolist()
        spans = list(zip(batch.key, ends, ends[1:], strict=False))
        if batch.greedy is None:
            values = batch.notes["greedy"].cpu().numpy().astype(np.int32)
            self.greedy |= {i: values[start:stop] for i, start, stop in spans}
        centroid = batch.notes.get("centroid")
        if centroid is None or batch.centroid is not None:
            return
        for i, start, stop in spans:
            size = (stop - start) * centroid.shape[1] * centroid.element_size()
            if i not in self.centroid and size <= self.cache_bytes:
                self.centroid[i] = centroid[start:stop].detach().to("cpu", copy=True)
                self.cache_bytes -= size
