"""Erase single requests from shards: their record, and every block that no other record uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, ShardError, StreamBusyError
from .codec import erased_block
from .frames import (
    BLOCK,
    FRAME_HEAD_BYTES,
    HEADER_AREA_BYTES,
    META,
    RECORD,
    pack_frame_head,
    unpack_frame_head,
)
from .layout import BlockRef
from .reader import ShardFile, ShardStore
from .scan import scan_frames
from .source import FdSource
from .writer import LOCK_NAME, _fsync_dir, _write_all, write_seal


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """What was erased."""

    num_records: int
    num_blocks: int
    kept_blocks: int
    """Blocks of the erased records that stay, because other records share them (a common prefix)."""
    shards: tuple[Path, ...]
    """Files that were written anew."""
    kept_for: tuple[str, ...]
    """Records that use the blocks that stay, oldest first, by the ids that they have now."""


def forget(store: ShardStore, record_ids: Iterable[str]) -> ForgetReport:
    """Erase records from sealed shards.

    Affected files are written anew beside the old ones and take their place in one step; ordinals of later
    records of a shard move up, addresses of blocks stay. The old bytes are unlinked, not overwritten: what a
    file system or its snapshots keep is beyond this program. ``store`` must be opened again afterwards.

    Args:
        store: The folder.
        record_ids: ``stream/shard/ordinal`` each.

    Raises:
        InputError: An id does not exist.
        StreamBusyError: The stream's writer is alive; it may still share the blocks with new requests.
        ShardError: A journal is unsealed, or a file cannot be written; finished files stay as they are.
    """
    if not isinstance(store.root, Path):
        raise InputError(f"{store.root} is remote; forget in the local folder, then upload again")
    records = {record_id: store.find(record_id) for record_id in record_ids}
    by_stream: dict[str, set[str]] = {}
    for record in records.values():
        by_stream.setdefault(record.stream, set()).add(record.id)
    num_blocks = kept_blocks = 0
    kept_for: list[str] = []
    written: list[Path] = []
    for stream, ids in sorted(by_stream.items()):
        with _stream_lock(store.root / stream):
            erase, kept, users = _own_blocks(store, stream, ids)
            num_blocks += len(erase)
            kept_blocks += kept
            files = {file.number: file for file in store.files() if file.stream == stream}
            touched = {int(i.split("/")[1]) for i in ids} | {ref.shard for ref in erase}
            for number in sorted(touched & set(files)):
                file = files[number]
                if not file.sealed:
                    raise ShardError(
                        f"{file.path}: is a journal; 'specdec-tap shards repair' seals it, then forget again",
                        path=file.path,
                    )
                drop = {int(i.split("/")[2]) for i in ids if int(i.split("/")[1]) == number}
                _rewrite(file, drop, {ref.block for ref in erase if ref.shard == number})
                written.append(file.path)
            kept_for += users
    return ForgetReport(len(records), num_blocks, kept_blocks, tuple(written), tuple(kept_for))


def _own_blocks(store: ShardStore, stream: str, ids: set[str]) -> tuple[set[BlockRef], int, list[str]]:
    """Look at who uses the blocks of some records.

    Returns:
        The blocks that only these records use, how many they share with others, and the ids that those others
        will have once these records are gone.
    """
    files = [file for file in store.files() if file.stream == stream]
    mine: set[BlockRef] = set()
    for number, ordinal in (map(int, i.split("/")[1:]) for i in ids):
        file = next(file for file in files if file.number == number)
        mine |= {piece.block for piece in file.record(ordinal).pieces}
    shared: set[BlockRef] = set()
    users = []
    for file in files:
        gone = 0
        for ordinal in range(file.totals.num_records):
            if f"{stream}/{file.number:06d}/{ordinal}" in ids:
                gone += 1
                continue
            # An unreadable record could point anywhere: better an error than an erased shared prefix.
            if used := mine & {piece.block for piece in file.record(ordinal).pieces}:
                shared |= used
                users.append(f"{stream}/{file.number:06d}/{ordinal - gone}")
    return mine - shared, len(shared), users


@contextlib.contextmanager
def _stream_lock(folder: Path) -> Iterator[None]:
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as err:
        raise ShardError(f"{folder}: cannot be locked ({err.strerror})", path=folder) from err
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as err:
        raise StreamBusyError(
            f"{folder}: its writer is alive and may still share these states with new requests; stop "
            "it first",
            path=folder,
        ) from err
    finally:
        os.close(fd)


def _rewrite(file: ShardFile, drop_records: set[int], erase_blocks: set[int]) -> None:
    """Copy a sealed shard without some records and with some blocks emptied, then put it in its place."""
    temporary = file.path.with_name(f".{file.path.stem}.creating")
    try:
        out = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _copy_frames(file, out, drop_records, erase_blocks)
        finally:
            os.close(out)
        temporary.replace(file.path)
        _fsync_dir(file.path.parent)
    except BaseException as err:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(err, OSError) and not isinstance(err, ShardError):
            raise ShardError(f"{file.path}: cannot be written anew ({err.strerror})", path=file.path) from err
        raise


def _copy_frames(file: ShardFile, out: int, drop_records: set[int], erase_blocks: set[int]) -> None:
    blocks = records = sequence = 0
    at, end = HEADER_AREA_BYTES, HEADER_AREA_BYTES
    _write_all(out, [bytes(HEADER_AREA_BYTES)], 0)
    stop = _frames_end(file)
    while at < stop:
        head = unpack_frame_head(file.source.read(at, FRAME_HEAD_BYTES), at)
        payload = file.source.read(at + FRAME_HEAD_BYTES, head.payload_bytes)
        at += FRAME_HEAD_BYTES + head.payload_bytes
        keep = True
        if head.kind == BLOCK:
            if blocks in erase_blocks:
                payload = erased_block(file.header)
            blocks += 1
        elif head.kind == RECORD:
            keep = records not in drop_records
            records += 1
        elif head.kind != META:
            raise ShardError(
                f"{file.path}: holds a frame of kind {head.kind} among its blocks", path=file.path
            )
        if keep:
            frame_head = pack_frame_head(head.kind, sequence, payload)
            _write_all(out, [frame_head, payload], end)
            end += len(frame_head) + len(payload)
            sequence += 1
    scan = scan_frames(FdSource(out), check_payloads=True)
    if scan.problem is not None or scan.header is None or scan.end != end:
        raise ShardError(
            f"{file.path}: is damaged ({scan.problem}); repair it before forgetting", path=file.path
        )
    write_seal(out, scan.header, scan.totals, scan.index, scan.end, scan.sequence)


def _frames_end(file: ShardFile) -> int:
    scan = scan_frames(file.source, check_payloads=True)
    if scan.damaged or scan.problem is not None:
        raise ShardError(
            f"{file.path}: is damaged ({(scan.damaged or [scan.problem])[0]}); repair it before forgetting",
            path=file.path,
        )
    return scan.end
