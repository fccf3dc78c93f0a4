"""The writer process: reads steps from the ring, assembles sequences, writes shards.

Started by the worker as ``python -m specdec_tap.capture.writer_process SOCKET_FD RING_FD RING_BYTES``.
It never imports torch or vllm. It lives until the worker closes the socket, then seals what it holds;
signals that end the server do not end it (it has a session of its own). One thread does everything but
uploading: encoding runs at about 1 GB/s of states, which is 17,000 tokens/s for a hidden size of 7168.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..config import TapConfig
from ..errors import SpecdecTapError
from ..shards.codec import encode_block
from ..shards.layout import BlockRef, RecordMeta, ShardHeader
from ..shards.writer import ShardWriter
from . import protocol
from .assembler import GRANULE, Assembler, NewRequest, SinkError
from .retention import Ages, end_dead_streams, enforce, write_status
from .ring import Ring
from .status import SERVER_ID_VARIABLE, STATUS_NAME
from .upload import BackgroundUpload

logger = logging.getLogger("specdec_tap.writer")

STATUS_INTERVAL_S = 1.0
NAP_S, NAP_SLICE_S, NAP_FILL = 0.2, 0.02, 1 / 8
RETENTION_INTERVAL_S = 5.0
RETRY_INTERVAL_S = 2.0
REPAIR_TIMEOUT_S = 10.0
"""How long a writer that ends at once still seals what dead writers left."""
MAX_ERRORS = 100
"""Messages that may fail (a bug) before the process gives up and is replaced."""
MIN_INDEX_TOKENS = 1 << 16


class StreamGoneError(Exception):
    """The stream's folder was removed: only a new stream can go on."""


class ShardSink:
    """Encodes blocks and appends them to the stream; a failing disk costs requests, not the process."""

    def __init__(self, config: TapConfig, header: ShardHeader, ring: Ring) -> None:
        self._header = header
        self._ring = ring
        self.writer = ShardWriter(
            config.dir,
            header,
            max_shard_bytes=config.max_shard_bytes,
            max_shard_age_s=config.max_shard_age_s,
            min_free_bytes=config.min_free_bytes,
        )
        self.last_error: str | None = None
        self._retry_at = 0.0
        self._leaning: Counter[int] = Counter()
        """Records of later shards by the oldest shard that they point into."""

    def put_block(self, position: int, aux: np.ndarray, final: np.ndarray | None, final_row: int) -> BlockRef:
        self._check()
        payload = encode_block(self._header, position=position, aux=aux, final=final, final_row=final_row)
        try:
            ref = self.writer.append_block(payload, position=position, num_rows=aux.shape[1])
        except (OSError, SpecdecTapError) as err:
            raise self._failed(err) from err
        self._ring.writer.add("stored_bytes", len(payload))
        return ref

    def put_record(self, record: RecordMeta) -> None:
        self._check()
        try:
            self.writer.append_record(record)
        except (OSError, SpecdecTapError) as err:
            raise self._failed(err) from err
        self.last_error = None
        oldest = min((piece.block.shard for piece in record.pieces), default=self.writer.shard)
        if oldest < self.writer.shard:
            self._leaning[oldest] += 1

    def forget_shard(self, shard: int) -> None:
        """A shard was removed: count the records that lost a part with it."""
        self._ring.writer.add("records_cut", self._leaning.pop(shard, 0))

    def attempt(self, action: Callable[[], Any]) -> None:
        """Do something on the disk that no request waits for; a failure is noted."""
        try:
            action()
        except (OSError, SpecdecTapError) as err:
            self.note(err)

    def note(self, err: Exception) -> None:
        """Remember an error and say it once."""
        if str(err) != self.last_error:
            logger.error("cannot store captured states, requests are dropped until it works again: %s", err)
        self.last_error = str(err)

    def _check(self) -> None:
        if time.monotonic() < self._retry_at:
            raise SinkError(self.last_error)

    def _failed(self, err: Exception) -> SinkError:
        self.note(err)
        self._retry_at = time.monotonic() + RETRY_INTERVAL_S
        return SinkError(str(err))


class Writer:
    """Handles the worker's messages, one at a time."""

    def __init__(self, ring: Ring, hello: dict[str, Any]) -> None:
        self.config = TapConfig.from_json(hello["config"])
        self.header = ShardHeader.from_json(hello["header"])
        self.ring = ring
        self.state: dict[str, Any] = hello["state"]
        self.started = time.time()
        self.sink = ShardSink(self.config, self.header, ring)
        self.layers = self.header.num_aux + 1
        # The engine's cache blocks must be multiples of a granule; where they are tiny, some hits are gaps.
        granule = math.gcd(GRANULE, int(hello["cache_block_tokens"]))
        self.assembler = Assembler(
            self.sink,
            num_layers=self.layers,
            hidden_size=self.header.hidden_size,
            dtype=self.header.dtype,
            count=ring.writer.add,
            block_tokens=self.header.block_tokens,
            final_scope=self.header.final_scope,
            response_window=self.config.response_window,
            min_tokens=self.config.min_tokens,
            max_tokens=self.config.max_tokens,
            max_index_tokens=index_tokens(int(hello["cache_tokens"])),
            granule=granule if granule >= 4 else GRANULE,
        )
        self.upload: BackgroundUpload | None = None
        if self.config.upload_url is not None:
            self.upload = BackgroundUpload(
                self.config.dir,
                self.header.stream,
                self.config.upload_url,
                remove_local=self.config.upload_remove_local,
            )
        self.status_path = self.config.dir / self.header.stream / STATUS_NAME
        self.ages = Ages()
        self._status_at = self._retention_at = 0.0
        self._num_errors = self._num_sealed = 0

    def handle(self, message: bytes) -> None:
        """Do what a message says; a bug in that costs what the message was about, not the process."""
        try:
            self._handle(message)
        except Exception:  # whatever the bug is, what was stored before it must stay whole
            self._num_errors += 1
            logger.exception("a message of kind %d could not be handled", message[0])
            if self._num_errors >= MAX_ERRORS:
                raise

    def _handle(self, message: bytes) -> None:
        kind = message[0]
        if kind == protocol.STEP:
            step = protocol.unpack_step(message)
            try:
                self._on_step(step)
            finally:
                self.ring.release(step.end)
                self.ring.writer.add("steps_handled")
        elif kind == protocol.FINISH:
            for handle in protocol.unpack_handles(message)[0]:
                self.assembler.on_finish(handle)
        elif kind == protocol.NEW:
            self._on_new(protocol.unpack_json(message))
        elif kind == protocol.DROP:
            handles, reason = protocol.unpack_handles(message)
            for handle in handles:
                self.assembler.give_up(handle, reason)
        elif kind == protocol.CONTROL:
            self._on_control(protocol.unpack_json(message))
        else:
            raise AssertionError(f"unknown message kind {kind}")

    def _on_new(self, new: dict[str, Any]) -> None:
        num_prompt, num_stops = new["num_prompt_tokens"], new["num_stop_tokens"]
        ids = self.ring.data[new["offset"] : new["offset"] + 4 * (num_prompt + num_stops)].view(np.int32)
        prompt, stops = ids[:num_prompt].copy(), frozenset(ids[num_prompt:].tolist())
        self.ring.release(new["end"])
        self.ring.writer.add("announced_seen")
        self.assembler.on_new(
            NewRequest(
                handle=new["handle"],
                request_id=new["request_id"],
                prompt_token_ids=prompt,
                stop_token_ids=stops,
                max_response_tokens=new["max_response_tokens"],
                sampling=new["sampling"],
                lora=new["lora"],
                salt=new["salt"].encode("utf-8", "surrogatepass"),
                given_spans=tuple((int(a), int(b)) for a, b in new["given_spans"]),
            )
        )

    def _on_step(self, step: protocol.Step) -> None:
        _, _, num_rows, num_requests, num_columns = step
        bits, hidden = self.header.bits_dtype, self.header.hidden_size
        layout = protocol.StepLayout(self.layers, hidden, bits.itemsize, num_rows, num_requests, num_columns)
        offsets = layout.offsets()
        data = self.ring.data[step.offset : step.offset + offsets[-1]]

        def array(i: int, dtype: Any, *shape: int) -> np.ndarray:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            return data[offsets[i] : offsets[i] + size].view(dtype).reshape(shape)

        self.assembler.on_step(
            array(5, np.uint64, num_requests),
            array(6, np.int32, num_requests + 1),
            array(1, np.int64, num_rows),
            array(2, np.int32, num_rows),
            array(0, bits, self.layers, num_rows, hidden),
            array(3, np.int32, num_requests, num_columns),
            array(4, np.int32, num_requests),
        )

    def _on_control(self, control: dict[str, Any]) -> None:
        action = control["action"]
        if action == "cache":
            self.assembler.size_index(index_tokens(control["tokens"]))
        elif action == "state":
            self.state = {name: control[name] for name in self.state}
        elif action == "flush":
            self.sink.attempt(self.sink.writer.flush)
        elif action == "rotate":
            self.sink.attempt(self.sink.writer.rotate)
        else:
            raise AssertionError(f"unknown control {action!r}")
        self.ring.writer.add("controls_done")
        self._status_at = 0.0

    def tick(self, *, closed: bool = False) -> None:
        """After each message: keep the folder in bounds; once a second: fsync, age, the status file.

        Raises:
            StreamGoneError: Somebody removed the stream's folder.
        """
        now = time.monotonic()
        sealed = self.sink.writer.shard - 1
        if sealed != self._num_sealed or now >= self._retention_at:
            self.ring.writer.add("shards_sealed", sealed - self._num_sealed)
            self._num_sealed = sealed
            self._retention_at = now + RETENTION_INTERVAL_S
            if self.config.max_bytes is not None or self.config.max_age_s is not None:
                self.sink.attempt(self._enforce)
        if now < self._status_at and not closed:
            return
        self._status_at = now + STATUS_INTERVAL_S
        if not closed:
            self.sink.attempt(self.sink.writer.flush)
        try:
            write_status(self.status_path, self.status(closed))
        except FileNotFoundError as err:
            raise StreamGoneError(f"{str(self.status_path.parent)!r} was removed") from err
        except OSError as err:
            self.sink.note(err)

    def _enforce(self) -> None:
        config, stream = self.config, self.header.stream
        removed = enforce(
            config.dir,
            stream,
            max_bytes=config.max_bytes,
            max_age_s=config.max_age_s,
            ages=self.ages,
            may_go=None if self.upload is None else self.upload.has,
        )
        for gone in removed:
            self.ring.writer.add("retired_bytes", gone.num_bytes)
            if gone.stream == stream:
                self.assembler.forget_shard(gone.shard)
                self.sink.forget_shard(gone.shard)

    def status(self, closed: bool) -> dict[str, Any]:
        try:
            free = shutil.disk_usage(self.config.dir).free
        except OSError:
            free = None
        upload = None if self.upload is None else self.upload.status()
        return {
            "stream": self.header.stream,
            "pid": os.getpid(),
            "closed": closed,
            "server_id": os.environ.get(SERVER_ID_VARIABLE),
            **self.state,
            "started_unix_s": self.started,
            "updated_unix_s": time.time(),
            "worker": self.ring.worker.snapshot(),
            "writer": self.ring.writer.snapshot(),
            "live_requests": self.assembler.num_live,
            "ring_bytes": self.ring.size,
            "ring_used_bytes": self.ring.used_bytes_now(),
            "disk_free_bytes": free,
            "min_free_bytes": self.config.min_free_bytes,
            "max_bytes": self.config.max_bytes,
            "last_error": self.sink.last_error or (upload and upload["last_error"]),
            "upload": upload,
            "engine": dict(self.header.engine),
            "aux_layer_ids": list(self.header.aux_layer_ids),
        }

    def close(self) -> None:
        """Seal everything; the worker is gone."""
        self.assembler.on_end()
        self.sink.attempt(self.sink.writer.close)
        self.tick(closed=True)

    def finish_upload(self, last: dict[str, Any]) -> None:
        """Send what was sealed last, and say so in the stream's status.

        Args:
            last: The status when it was sealed; the ring's counters may be another writer's by now.
        """
        if self.upload is None:
            return
        self.upload.close()
        upload = self.upload.status()
        error = self.sink.last_error or upload["last_error"]
        with contextlib.suppress(OSError):  # the folder may be gone
            changes = {"upload": upload, "last_error": error, "updated_unix_s": time.time()}
            write_status(self.status_path, last | changes)


def index_tokens(cache_tokens: int) -> int:
    """How many tokens the prefix index remembers: what the engine's cache holds, and as much again.

    Example:
        >>> index_tokens(1_000_000), index_tokens(0)
        (2000000, 0)
    """
    return max(2 * cache_tokens, MIN_INDEX_TOKENS) if cache_tokens else 0


def serve(channel: socket.socket, writer: Writer) -> None:
    """Handle messages until the worker closes its end, then seal.

    It naps between batches of messages: woken by each, on a machine with few cores it would take the CPU from
    the engine's own process at the very moment at which that waits for a step's end.
    """
    channel.settimeout(STATUS_INTERVAL_S)
    writer.tick()
    while True:
        try:
            message = channel.recv(protocol.MAX_MESSAGE_BYTES)
        except TimeoutError:
            writer.tick()
            continue
        except ConnectionResetError:
            break
        if not message:
            break
        writer.handle(message)
        writer.tick()
        if not select.select([channel], [], [], 0)[0]:
            nap(writer.ring)
    writer.close()


def nap(ring: Ring) -> None:
    """Let messages gather, unless the ring fills."""
    until = time.monotonic() + NAP_S
    while time.monotonic() < until and ring.used_bytes_now() < ring.size * NAP_FILL:
        time.sleep(NAP_SLICE_S)


def stand_back(nice: int) -> None:
    """Let the engine have the CPU first: a lower share, and no interrupting what runs.

    A session of its own is a scheduling group of its own where the kernel has autogroups, and niceness then
    counts within the group only: the group gets it too.
    """
    os.nice(nice)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def main(argv: list[str]) -> int:
    logging.basicConfig(format="specdec-tap writer: %(message)s", level=logging.INFO, stream=sys.stderr)
    if os.fork():
        # vLLM ends by killing its whole process tree; whoever seals the shards must not be in it.
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # ends when the worker's end of the socket closes
    channel = socket.socket(fileno=int(argv[1]))
    ring = Ring(int(argv[2]), int(argv[3]))
    hello = protocol.unpack_json(channel.recv(protocol.MAX_MESSAGE_BYTES))
    try:
        stand_back(int(hello["config"]["writer_nice"]))
        writer = Writer(ring, hello)
    except (OSError, SpecdecTapError) as err:
        channel.send(json.dumps({"error": str(err)}).encode())
        return 1
    channel.send(b'{"error":null}')
    repair = threading.Thread(target=end_dead_streams, args=(writer.config.dir,), daemon=True)
    repair.start()
    try:
        serve(channel, writer)
        repair.join(timeout=REPAIR_TIMEOUT_S)
        last = writer.status(closed=True)
        # A worker that replaces its weights waits for this, and must not wait for a store.
        channel.close()
        writer.finish_upload(last)
    except StreamGoneError as err:
        logger.error("%s; what this writer held is lost, a new one starts", err)
        return 1
    done = ring.writer
    logger.info(
        "sealed %s requests, %s tokens, %.1f MB", f"{done.get('requests_sealed'):,}",
        f"{done.get('tokens'):,}", done.get("stored_bytes") / 1e6,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
