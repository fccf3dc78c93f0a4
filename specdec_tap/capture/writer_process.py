"""The writer process: reads steps from the ring, assembles sequences, writes shards.

Started by the worker as ``python -m specdec_tap.capture.writer_process SOCKET_FD RING_FD RING_BYTES``.
It never imports torch or vllm. It lives until the worker closes the socket, then seals what it holds;
signals that end the server do not end it (it has a session of its own).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..config import TapConfig
from ..errors import SpecdecTapError
from ..shards.codec import encode_block
from ..shards.layout import BlockRef, RecordMeta, ShardHeader
from ..shards.writer import ShardWriter
from . import protocol
from .assembler import Assembler, NewRequest, SinkError
from .ring import Ring

logger = logging.getLogger("specdec_tap.writer")

STATUS_NAME = ".status.json"
STATUS_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 2.0


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

    def _check(self) -> None:
        if time.monotonic() < self._retry_at:
            raise SinkError(self.last_error)

    def _failed(self, err: Exception) -> SinkError:
        if str(err) != self.last_error:
            logger.error("cannot store captured states, requests are dropped until it works again: %s", err)
        self.last_error = str(err)
        self._retry_at = time.monotonic() + RETRY_INTERVAL_S
        return SinkError(str(err))


class Writer:
    """Handles the worker's messages, one at a time."""

    def __init__(self, ring: Ring, hello: dict[str, Any]) -> None:
        self.config = TapConfig.from_json(hello["config"])
        self.header = ShardHeader.from_json(hello["header"])
        self.ring = ring
        self.started = time.time()
        self.sink = ShardSink(self.config, self.header, ring)
        self.layers = self.header.num_aux + 1
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
            max_index_tokens=int(hello["max_index_tokens"]),
        )
        self.status_path = self.config.dir / self.header.stream / STATUS_NAME
        self._status_at = 0.0
        self._retention_at = 0.0

    def handle(self, message: bytes) -> None:
        kind = message[0]
        if kind == protocol.STEP:
            step = protocol.unpack_step(message)
            try:
                self._on_step(step)
            finally:
                self.ring.release(step.end)
                self.ring.writer.add("steps_handled")
        elif kind == protocol.FINISH:
            for handle in protocol.unpack_handles(message):
                self.assembler.on_finish(handle)
        elif kind == protocol.NEW:
            self._on_new(protocol.unpack_json(message))
        elif kind == protocol.DROP:
            for handle in protocol.unpack_handles(message):
                self.assembler.drop(handle, None)
        elif kind == protocol.CONTROL:
            self._on_control(protocol.unpack_json(message))
        else:
            raise AssertionError(f"unknown message kind {kind}")

    def _on_new(self, new: dict[str, Any]) -> None:
        ids = self.ring.data[new["offset"] : new["offset"] + 4 * new["num_prompt_tokens"]]
        prompt = ids.view(np.int32).copy()
        self.ring.release(new["end"])
        self.ring.writer.add("announced_seen")
        self.assembler.on_new(
            NewRequest(
                handle=new["handle"],
                request_id=new["request_id"],
                prompt_token_ids=prompt,
                stop_token_ids=frozenset(new["stop_token_ids"]),
                max_response_tokens=new["max_response_tokens"],
                sampling=new["sampling"],
                lora=new["lora"],
                salt=(new["lora"] or "").encode(),
            )
        )

    def _on_step(self, step: protocol.Step) -> None:
        num_requests = len(step.handles)
        item = self.header.bits_dtype.itemsize
        layout = protocol.StepLayout(
            self.layers, self.header.hidden_size, item, step.num_rows, num_requests, step.num_columns
        )
        offsets = layout.offsets()
        data = self.ring.data[step.offset : step.offset + offsets[-1]]

        def array(i: int, dtype: Any, *shape: int) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return data[offsets[i] : offsets[i] + size].view(dtype).reshape(shape)

        self.assembler.on_step(
            step.handles,
            step.query_start_loc,
            array(1, np.int64, step.num_rows),
            array(2, np.int32, step.num_rows),
            array(0, self.header.bits_dtype, self.layers, step.num_rows, self.header.hidden_size),
            array(3, np.int32, num_requests, step.num_columns),
            array(4, np.int32, num_requests),
        )

    def _on_control(self, control: dict[str, Any]) -> None:
        if control["action"] in ("flush", "rotate"):
            try:
                getattr(self.sink.writer, control["action"])()
            except (OSError, SpecdecTapError) as err:
                self.sink._failed(err)
        self._status_at = 0.0

    def tick(self, *, closed: bool = False) -> None:
        """About once a second: age out shards, keep the folder in bounds, publish the status file."""
        now = time.monotonic()
        if now < self._status_at and not closed:
            return
        self._status_at = now + STATUS_INTERVAL_S
        if not closed:
            try:
                self.sink.writer.flush()
            except (OSError, SpecdecTapError) as err:
                self.sink._failed(err)
        try:
            write_status(self.status_path, self.status(closed))
        except OSError as err:
            self.sink._failed(err)

    def status(self, closed: bool) -> dict[str, Any]:
        try:
            free = shutil.disk_usage(self.config.dir).free
        except OSError:
            free = None
        return {
            "stream": self.header.stream,
            "pid": os.getpid(),
            "closed": closed,
            "started_unix_s": self.started,
            "updated_unix_s": time.time(),
            "worker": self.ring.worker.snapshot(),
            "writer": self.ring.writer.snapshot(),
            "live_requests": self.assembler.num_live,
            "ring_bytes": self.ring.size,
            "ring_used_bytes": self.ring.used_bytes_now(),
            "disk_free_bytes": free,
            "last_error": self.sink.last_error,
            "engine": dict(self.header.engine),
            "aux_layer_ids": list(self.header.aux_layer_ids),
        }

    def close(self) -> None:
        """Seal everything; the worker is gone."""
        self.assembler.on_end()
        try:
            self.sink.writer.close()
        except (OSError, SpecdecTapError) as err:
            self.sink._failed(err)
        self.tick(closed=True)


def write_status(path: Path, status: dict[str, Any]) -> None:
    """Replace the status file in one step, mode 0600."""
    temp = path.with_suffix(".tmp")
    fd = os.open(temp, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        os.write(fd, json.dumps(status).encode())
    finally:
        os.close(fd)
    temp.replace(path)


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
        os.nice(int(hello["config"]["writer_nice"]))
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not the core its parent's thread is pinned to
        writer = Writer(ring, hello)
    except (OSError, SpecdecTapError) as err:
        channel.send(json.dumps({"error": str(err)}).encode())
        return 1
    writer.tick()
    channel.send(b'{"error":null}')
    channel.settimeout(STATUS_INTERVAL_S)
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
    writer.close()
    done = ring.writer
    logger.info(
        "sealed %s requests, %s tokens, %.1f MB", f"{done.get('requests_sealed'):,}",
        f"{done.get('tokens'):,}", done.get("stored_bytes") / 1e6,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
