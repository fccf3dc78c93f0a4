"""Prove that shards hold what they claim: bytes, structure, and the values themselves.

Three layers, each able to fail on its own:

1. *Bytes*: every checksum, every frame in its place, index and header totals equal to what the frames say.
2. *Structure*: no NaN, no infinity, no all-zero row, rows and tokens of the right length, pieces that
   point where they should, token ids inside the vocabulary, no state repeated for a different token.
3. *Content*: with the target's head (``target/``), final states must have the size the final norm gives
   them and must produce the tokens that the server really sampled; aux states must belong to the token at
   their position. With ``reference`` (a model directory), a Hugging Face forward is the judge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, ShardError, SpecdecTapError
from .codec import Block, decode_block
from .content import ContentChecker
from .frames import FRAME_HEAD_BYTES
from .layout import ShardHeader
from .reader import Record, ShardFile, ShardStore, open_shards
from .scan import Scan, scan_frames

_MAX_FINDINGS = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (``error``) or worth knowing (``warning``)."""

    level: str
    code: str
    """Stable name, such as ``bad_checksum``."""
    where: str
    """File or record."""
    message: str

    def __str__(self) -> str:
        return f"{self.level} {self.code}: {self.where}: {self.message}"


@dataclass(slots=True)
class VerifyReport:
    """Everything ``verify_shards`` found, with the numbers behind the verdict."""

    findings: list[Finding] = field(default_factory=list)
    """At most 1,000; ``counts`` goes on counting."""
    counts: Counter[str] = field(default_factory=Counter)
    """Findings by ``level code``, plus the number of things looked at (``num_...``)."""
    content: dict[str, Any] = field(default_factory=dict)
    """Measured values: agreement, norm statistics, calibration, reference errors."""
    not_checked: list[str] = field(default_factory=list)
    """Which proofs could not be made, and what they need."""

    @property
    def ok(self) -> bool:
        """No error was found."""
        return self.num_errors == 0

    @property
    def num_errors(self) -> int:
        """How many errors, listed or not."""
        return sum(n for name, n in self.counts.items() if name.startswith("error "))

    def add(self, level: str, code: str, where: str, message: str) -> None:
        """Count a finding and keep it if there is room."""
        self.counts[f"{level} {code}"] += 1
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(Finding(level, code, where, message))

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``--json``."""
        return {
            "ok": self.ok,
            "num_errors": self.num_errors,
            "counts": dict(sorted(self.counts.items())),
            "findings": [
                {"level": f.level, "code": f.code, "where": f.where, "message": f.message}
                for f in self.findings
            ],
            "content": _finite(self.content),
            "not_checked": self.not_checked,
        }


def _finite(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON cannot say."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verify_shards(
    path: Path | str,
    *,
    streams: tuple[str, ...] | None = None,
    target_dir: Path | None = None,
    content_rows: int = 8192,
    reference: Path | None = None,
    reference_records: int = 4,
    progress: Callable[[str, int, int], None] | None = None,
) -> VerifyReport:
    """Check a folder of shards, one stream, or one file.

    Args:
        path: As for ``open_shards``.
        streams: Only these streams.
        target_dir: Folder with the target's head; ``path``/target by default.
        content_rows: At most about this many final states go through the head, from records spread evenly;
            0 skips that proof. It costs one row of logits each.
        reference: Hugging Face model directory for a forward of ``reference_records`` records.
        reference_records: How many.
        progress: Called as ``progress(what, done, total)``.

    Returns:
        The report; ``report.ok`` is the verdict. Damaged data is a finding, not an exception.

    Raises:
        InputError: ``path`` holds nothing to verify, or ``reference`` or ``target_dir`` is unusable.
        IncompatibleShardsError: Shards of different targets in one folder.
    """
    report = VerifyReport()
    tell = progress or (lambda what, done, total: None)
    # follow: a folder in which no shard is readable has findings, not an exception.
    with open_shards(path, streams=streams, follow=True) as store:
        for problem in store.skipped:
            code = "unreadable_shard" if _looks_like_shard(problem.path) else "foreign_file"
            report.add(
                "error" if code == "unreadable_shard" else "warning", code, str(problem.path), problem.message
            )
        if not store.shards and not store.skipped:
            _ = store.header  # raises InputError: nothing here
        repeats = _check_files(store, report, tell)
        _check_records(store, report, repeats, tell)
        _check_content(store, report, target_dir, content_rows, tell)
        if reference is not None:
            from .reference import check_reference

            check_reference(store, report, Path(reference), reference_records, tell)
        elif len(store):
            report.not_checked.append(
                "values of the aux states (a wrong layer or a scale error there shows only against "
                "the model): "
                "pass --reference MODEL_DIR"
            )
    return report


def _looks_like_shard(path: Path) -> bool:
    return path.suffix in (".safetensors", ".open")


# ---- bytes


def _check_files(
    store: ShardStore, report: VerifyReport, tell: Callable[[str, int, int], None]
) -> set[tuple[str, int, int, int]]:
    """Check every byte of every file.

    Returns:
        (stream, shard, block, row) of rows whose aux states equal the row before, in all layers.
    """
    repeats: set[tuple[str, int, int, int]] = set()
    files = list(store.files())
    total = sum(f.source.size() for f in files)
    done = 0
    for file in files:
        report.counts["num_shards"] += 1
        _check_file(file, report, repeats, lambda n, base=done: tell("bytes", base + n, total))
        done += file.source.size()
    return repeats


def _check_file(
    file: ShardFile,
    report: VerifyReport,
    repeats: set[tuple[str, int, int, int]],
    tell: Callable[[int], None],
) -> None:
    where = str(file.path)
    scan = scan_frames(file.source, check_payloads=True)
    for err in scan.damaged:
        report.add("error", "bad_checksum", where, str(err))
    size = file.source.size()
    if scan.problem is not None and file.sealed:
        report.add("error", "broken_frame", where, str(scan.problem))
        return
    if scan.problem is not None:
        # Normal for a live journal, and for an abandoned one until it is repaired.
        report.add("warning", "torn_tail", where, f"{scan.problem}; readers stop before it")
    if file.sealed:
        _compare_sealed(file, scan, report, where)
        if scan.header != file.header:
            report.add("error", "header_mismatch", where, "META frame and header say different things")
        if not scan.damaged and scan.totals != file.totals:
            report.add("error", "totals_mismatch", where, f"header says {file.totals}, frames {scan.totals}")
        if not scan.was_sealed:
            report.add("error", "no_index", where, "the frames do not end with an INDEX frame")
        if file.mode() & 0o077:
            report.add(
                "warning", "file_mode", where, "other users can read it; captured traffic is private (0600)"
            )
    bad = _damaged_offsets(scan)
    for number, row in enumerate(scan.index.blocks):
        offset, payload_bytes = row[0], row[1]
        tell(min(offset, size))
        if offset in bad:
            continue
        payload = file.source.read(offset + FRAME_HEAD_BYTES, payload_bytes)
        try:
            block = decode_block(file.header, payload)
        except ShardError as err:
            report.add("error", "bad_block", f"{where}: block {number}", str(err))
            continue
        report.counts["num_blocks"] += 1
        report.counts["num_rows"] += block.num_rows
        if not block.num_rows:
            continue  # erased
        _check_values(file.header, block, f"{where}: block {number}", report)
        for row_number in _repeated_rows(block):
            repeats.add((file.stream, file.number, number, row_number))


def _damaged_offsets(scan: Scan) -> set[int | None]:
    return {err.offset for err in scan.damaged}


def _compare_sealed(file: ShardFile, scan: Scan, report: VerifyReport, where: str) -> None:
    """Compare the index with the frames that are whole; the damaged ones are findings already."""
    try:
        indexed_blocks, indexed_records = file.index()
    except ShardError as err:
        report.add("error", "bad_index", where, f"{err}; 'specdec-tap shards repair' rebuilds it")
        return
    bad = _damaged_offsets(scan)
    for what, indexed, scanned in (
        ("block", indexed_blocks, scan.index.blocks),
        ("record", indexed_records, scan.index.records),
    ):
        rows = list(zip(*(column.tolist() for column in indexed.values()), strict=True))
        if [row for row in rows if row[0] not in bad] != [row for row in scanned if row[0] not in bad]:
            report.add(
                "error",
                "index_mismatch",
                where,
                f"the index lists {len(rows):,} {what}s, the frames hold {len(scanned):,}, at other places "
                "or of other sizes; 'specdec-tap shards repair' rebuilds it",
            )


_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


def nonfinite_rows(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Rows of bits [n, ...] that hold a NaN or an infinity."""
    mask = bits.dtype.type(_EXPONENTS[dtype])
    found = (bits & mask) == mask
    return np.flatnonzero(found.reshape(len(bits), -1).any(axis=1))


def zero_rows(bits: np.ndarray) -> np.ndarray:
    """Rows of bits [n, H] that are all zero, of either sign."""
    return np.flatnonzero(~(bits << 1).any(axis=-1))


def _check_values(header: ShardHeader, block: Block, where: str, report: VerifyReport) -> None:
    layers = [(f"aux layer {i}", block.aux[a]) for a, i in enumerate(header.aux_layer_ids)]
    if block.final is not None:
        layers.append(("final state", block.final))
    for name, bits in layers:
        first = block.position + (block.final_row if name == "final state" else 0)
        rows = nonfinite_rows(bits, header.dtype)
        if len(rows):
            report.add(
                "error", "not_finite", where, f"{name} has NaN or infinity at {len(rows)} of {len(bits)} "
                f"positions, first at {first + int(rows[0]):,}",
            )  # fmt: skip
        rows = zero_rows(bits)
        if len(rows):
            report.add(
                "error", "zero_row", where, f"{name} is all zero at {len(rows)} of {len(bits)} positions, "
                f"first at {first + int(rows[0]):,}",
            )  # fmt: skip


def _repeated_rows(block: Block) -> list[int]:
    if block.aux.shape[0] == 0 or block.num_rows < 2:
        return []
    rows = block.aux.transpose(1, 0, 2)
    # Comparing one layer first is enough to clear almost every block.
    candidates = np.flatnonzero((rows[1:, 0, :8] == rows[:-1, 0, :8]).all(axis=1)) + 1
    return [int(r) for r in candidates if np.array_equal(rows[r], rows[r - 1])]


# ---- structure


def _check_records(
    store: ShardStore,
    report: VerifyReport,
    repeats: set[tuple[str, int, int, int]],
    tell: Callable[[str, int, int], None],
) -> None:
    seen: dict[str, str] = {}
    for number, record in enumerate(_records(store, report)):
        tell("records", number, len(store))
        meta, header = record.meta, record.header
        report.counts["num_records"] += 1
        report.counts["num_tokens"] += meta.num_tokens
        if int(meta.token_ids.max()) >= header.target.vocab_size:
            report.add(
                "error",
                "token_out_of_vocab",
                record.id,
                f"token id {int(meta.token_ids.max()):,} with a vocabulary of {header.target.vocab_size:,}",
            )
        at = 0
        for span in meta.spans:
            if span.start != at:
                report.add(
                    "error", "span_hole", record.id, f"no span covers positions [{at:,}, {span.start:,})"
                )
            at = span.stop
        if at != meta.num_tokens:
            report.add("error", "span_hole", record.id, f"no span covers [{at:,}, {meta.num_tokens:,})")
        _check_pieces(store, record, report, repeats)
        if meta.request_id:
            key = f"{record.stream}\0{meta.request_id}"
            if key in seen:
                report.add(
                    "warning",
                    "duplicate_request",
                    record.id,
                    f"request {meta.request_id!r} is also {seen[key]}",
                )
            seen[key] = record.id
    if report.counts["num_gap_rows"]:
        report.add(
            "warning",
            "gaps",
            str(store.root),
            f"{report.counts['num_gap_rows']:,} positions of "
            f"{report.counts['num_records_with_gaps']:,} records "
            "have no states (explicit gaps: prefix-cache hits on unknown prefixes, or dropped rows)",
        )
    if report.counts["num_removed_rows"]:
        report.add(
            "warning",
            "blocks_removed",
            str(store.root),
            f"{report.counts['num_removed_rows']:,} positions of "
            f"{report.counts['num_records_with_removed_rows']:,} records were stored in shards that are gone "
            "(retention removes the oldest first); they count as gaps",
        )
    if report.counts["num_response_rows_without_final"]:
        report.add(
            "warning",
            "final_missing",
            str(store.root),
            f"{report.counts['num_response_rows_without_final']:,} of {report.counts['num_response_rows']:,} "
            "response positions have no final state, so they train nothing",
        )


def _records(store: ShardStore, report: VerifyReport) -> Iterator[Record]:
    for number in store.numbers():  # an index that cannot be read is a finding already
        try:
            record = store[number]
        except SpecdecTapError as err:
            report.add("error", "bad_record", str(store.root), str(err))
            continue
        yield record


def _check_pieces(
    store: ShardStore, record: Record, report: VerifyReport, repeats: set[tuple[str, int, int, int]]
) -> None:
    gap_rows = sum(stop - start for start, stop in record.gaps)
    report.counts["num_removed_rows"] += record.removed_rows
    report.counts["num_records_with_removed_rows"] += record.removed_rows > 0
    gap_rows -= record.removed_rows
    report.counts["num_gap_rows"] += gap_rows
    report.counts["num_records_with_gaps"] += gap_rows > 0
    try:
        final = record.final_span
    except SpecdecTapError as err:
        report.add("error", "lost_block", record.id, str(err))
        return
    if record.header.final_scope != "none":
        for span in record.spans:
            if span.kind == "response":
                start, stop = max(span.start - 1, 0), span.stop - 1
                held = sum(max(0, min(stop, b) - max(start, a)) for a, b in final)
                report.counts["num_response_rows"] += stop - start
                report.counts["num_response_rows_without_final"] += stop - start - held
    ids = record.token_ids
    for piece in record.pieces:
        for row in range(piece.row_start + 1, piece.row_stop) if repeats else ():
            at = piece.position + row - piece.row_start
            if (record.stream, *piece.block, row) in repeats and ids[at] != ids[at - 1]:
                report.add(
                    "error",
                    "repeated_row",
                    record.id,
                    f"positions {at - 1:,} and {at:,} hold different tokens but the same states in "
                    "every layer",
                )


# ---- content


def _check_content(
    store: ShardStore,
    report: VerifyReport,
    target_dir: Path | None,
    content_rows: int,
    tell: Callable[[str, int, int], None],
) -> None:
    if not len(store) or content_rows <= 0:
        report.not_checked.append(
            "that final states produce the sampled tokens: content check was switched off"
        )
        return
    folder = target_dir or store.target_dir
    if folder is None:
        report.not_checked.append(
            "that final states produce the sampled tokens: needs the target's head in target/ or "
            "--target MODEL_DIR"
        )
        report.add(
            "warning", "no_target", str(store.root), "no target/ folder, so contents were not proven; "
            "'specdec-tap shards verify --target MODEL_DIR' takes the head from a checkpoint",
        )  # fmt: skip
        return
    from ..target import Fingerprint, fingerprint, load_target

    target = load_target(folder)
    wanted = (store.header.hidden_size, store.header.target.vocab_size, store.header.target.num_hidden_layers)
    if (target.hidden_size, target.vocab_size, target.num_hidden_layers) != wanted:
        raise InputError(
            f"target {str(folder)!r} has hidden size, vocabulary and layers "
            f"{(target.hidden_size, target.vocab_size, target.num_hidden_layers)}; the shards in "
            f"{str(store.root)!r} say {wanted}. Pass the folder of the model that they were captured from"
        )
    if target.config_sha256 != store.header.target.config_sha256:
        report.add(
            "warning",
            "target_config",
            str(folder),
            "config.json is not the one the shards were captured with",
        )
    info = store.header.target
    if what := Fingerprint(info.tables_sha256, info.layers_sha256).differs(fingerprint(target)):
        report.add(
            "warning",
            "target_weights",
            str(folder),
            f"has another {what} than the model that the shards were captured from (fingerprints differ)",
        )
    with np.errstate(all="ignore"):
        ContentChecker(store, report, target, content_rows, tell).run()


__all__ = ["Finding", "VerifyReport", "nonfinite_rows", "verify_shards", "zero_rows"]
