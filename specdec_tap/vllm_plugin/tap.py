"""The tap inside a vLLM worker: on the serving path, so every method here is short and never waits.

Order of calls for one engine step, all on the worker's thread::

    on_schedule(scheduler_output)   before the forward: who is new, who is finished
    begin_step(view)                after the forward: copy the rows into the ring
    end_step(sampled, num_sampled)  after sampling: copy the sampled ids, publish one message

Any exception is caught at this boundary (:func:`guarded`): it is counted, the requests it may have
spoilt are dropped whole, and serving goes on. A tap that keeps failing turns itself off.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ..capture import protocol
from ..capture.ring import CONTROL_BYTES, WRITER_OUTCOMES, Ring
from ..config import TapConfig
from ..errors import ConfigError
from ..shards.layout import MAX_REQUEST_ID_CHARS, ShardHeader

logger = logging.getLogger("vllm.specdec_tap")  # inside vLLM only the "vllm" logger has a handler

MAX_FAILURES = 20
WRITER_START_TIMEOUT_S = 60.0
RESTART_INTERVAL_S = 5.0
WARMUP_PREFIXES = ("_warmup_", "_v2_mixed_warmup")


@dataclass(slots=True)
class StepView:
    """One step of either model runner, rows not yet overwritten by the next forward.

    Args:
        req_ids: Batch order.
        query_start_loc: int32 ``[R + 1]`` on the host.
        positions: int64 ``[>= rows]``, as the forward used them.
        input_ids: ``[>= rows]``, as the forward used them.
        states: One ``[>= rows, H]`` tensor per aux layer, then the post-norm final state. Rows past
            ``query_start_loc[R]`` are padding.
    """

    req_ids: list[str]
    query_start_loc: np.ndarray
    positions: torch.Tensor
    input_ids: torch.Tensor
    states: list[torch.Tensor]


class _Pending:
    __slots__ = ("handles", "head", "num_rows", "offset", "starts")

    def __init__(
        self, head: int, offset: int, num_rows: int, handles: np.ndarray, starts: np.ndarray
    ) -> None:
        self.head, self.offset, self.num_rows, self.handles, self.starts = (
            head,
            offset,
            num_rows,
            handles,
            starts,
        )


def guarded(method: Callable[..., Any]) -> Callable[..., None]:
    """Keep an exception in the tap out of vLLM; count it and drop what it may have spoilt."""

    @functools.wraps(method)
    def call(self: Tap, *args: Any) -> None:
        if not self.active:
            return
        begin = time.perf_counter_ns()
        try:
            method(self, *args)
        except Exception as err:  # the serving boundary: nothing may get out
            self._hook_failed(method.__name__, err)
        self.ring.worker.add("hook_ns", time.perf_counter_ns() - begin)

    return call


class Tap:
    """Feeds one writer process from one worker.

    Args:
        config: Checked settings.
        header: What every shard of this stream will say of itself.
        max_rows: Most rows that one step can have (the scheduler's token budget).
        max_requests: Most requests in one batch.
        max_columns: Most tokens that one request can get from one step (1 + draft tokens).
        max_model_len: The engine's limit on prompt + response.
        max_index_tokens: Tokens that vLLM's prefix cache can hold; 0 when it is off.

    Raises:
        ConfigError: The ring cannot hold one step, or the writer process cannot start.
    """

    def __init__(
        self,
        config: TapConfig,
        header: ShardHeader,
        *,
        max_rows: int,
        max_requests: int,
        max_columns: int,
        max_model_len: int,
        max_index_tokens: int,
    ) -> None:
        self.config, self.header = config, header
        self._layers = header.num_aux + 1
        self._item = header.bits_dtype.itemsize
        self._max_columns = max_columns
        self._max_model_len = max_model_len
        self._max_index_tokens = max_index_tokens
        step_bytes = self._layout(max_rows, max_requests, max_columns).offsets()[-1] + 4 * max_model_len
        size = config.ring_bytes or max(4 * step_bytes, 64 << 20)
        if size < step_bytes:
            raise ConfigError(
                f"ring_bytes is {size:,} but one step of {max_rows:,} tokens takes {step_bytes:,}; set it to "
                f"{4 * step_bytes:,} or leave it at 0"
            )
        self.ring = Ring.create(size)
        self._bytes = torch.frombuffer(self.ring.buffer, dtype=torch.uint8)[CONTROL_BYTES:]
        self._dtype = getattr(torch, header.dtype)
        self._salt = os.urandom(8)
        self._handles: dict[str, int] = {}  # request id -> handle; 0: not captured
        self._next_handle = 1
        self._batch_ids: list[str] = []
        self._batch_handles = np.zeros(0, np.uint64)
        self._outbox: deque[bytes] = deque()
        self._pending: _Pending | None = None
        self._failures = 0
        self.paused = False
        self.active = True
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._rank_label = "r{}".format(header.engine.get("dp_rank", 0))
        self._start_writer()

    def _layout(self, num_rows: int, num_requests: int, num_columns: int) -> protocol.StepLayout:
        return protocol.StepLayout(
            self._layers, self.header.hidden_size, self._item, num_rows, num_requests, num_columns
        )

    def _view(self, offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        return self._bytes[offset : offset + size].view(dtype).view(shape)

    # -- hooks --------------------------------------------------------------------------------------

    @guarded
    def on_schedule(self, scheduler_output: Any) -> None:
        """Note new and finished requests before the forward of this step."""
        if self._pending is not None:  # sampling never ran for the last forward
            self.ring.rewind(self._pending.head)
            self._drop_handles(self._pending.handles, "dropped_hook_error")
            self._pending = None
        finished = scheduler_output.finished_req_ids
        if finished:
            handles = [h for r in finished if (h := self._handles.pop(r, 0))]
            if handles:
                self._outbox.append(protocol.pack_handles(protocol.FINISH, handles))
        if self._outbox:
            self._send_outbox()
        for new in scheduler_output.scheduled_new_reqs:
            # The V2 runner sends a resumed request as a new one, and warms up with made-up requests.
            if new.req_id not in self._handles and not new.req_id.startswith(WARMUP_PREFIXES):
                self._announce(new)

    @guarded
    def begin_step(self, view: StepView) -> None:
        """Copy this step's rows into the ring before anything overwrites them."""
        handles = self._handles_of(view.req_ids)
        starts = view.query_start_loc
        num_rows = int(starts[-1])
        captured = handles != 0
        rows: torch.Tensor | None = None
        if not captured.all():
            counts = np.diff(starts)
            rows = torch.from_numpy(np.flatnonzero(np.repeat(captured, counts)))
            starts = np.concatenate([[0], np.cumsum(np.where(captured, counts, 0))]).astype(np.int32)
            num_rows = len(rows)
        if num_rows == 0:
            return
        if self._outbox:  # the writer is behind: what cannot be queued is not waited for
            self._drop_handles(handles, "dropped_ring_full")
            return
        head = self.ring.head
        # How many columns sampling will have is not known yet; they come last, so the offsets hold.
        layout = self._layout(num_rows, len(handles), self._max_columns)
        room = self.ring.allocate(layout.offsets()[-1])
        if room is None:
            self._drop_handles(handles, "dropped_ring_full")
            return
        offset, _ = room
        at = layout.offsets()
        states = self._view(offset, self._dtype, self._layers, num_rows, self.header.hidden_size)
        positions = self._view(offset + at[1], torch.int64, num_rows)
        input_ids = self._view(offset + at[2], torch.int32, num_rows)
        if rows is None:
            for layer, state in enumerate(view.states):
                states[layer].copy_(state[:num_rows])
            positions.copy_(view.positions[:num_rows])
            input_ids.copy_(view.input_ids[:num_rows])
        else:
            for layer, state in enumerate(view.states):
                torch.index_select(state, 0, rows, out=states[layer])
            positions.copy_(view.positions[rows])
            input_ids.copy_(view.input_ids[rows])
        self._pending = _Pending(head, offset, num_rows, handles, starts)

    @guarded
    def end_step(self, sampled: torch.Tensor, num_sampled: torch.Tensor | None) -> None:
        """Add what was sampled and publish the step.

        Args:
            sampled: ``[R, S]`` token ids; without ``num_sampled``, -1 marks what is not there.
            num_sampled: ``[R]`` accepted tokens per request, or None.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        num_requests, columns = len(pending.handles), sampled.shape[1]
        if columns > self._max_columns or sampled.shape[0] < num_requests:
            self.ring.rewind(pending.head)
            raise RuntimeError(f"sampled ids have shape {tuple(sampled.shape)} for {num_requests} requests")
        layout = self._layout(pending.num_rows, num_requests, columns)
        at = layout.offsets()
        target = self._view(pending.offset + at[3], torch.int32, num_requests, columns)
        target.copy_(sampled[:num_requests])
        counts = self._view(pending.offset + at[4], torch.int32, num_requests)
        if num_sampled is None:
            counts.fill_(-1)
        else:
            counts.copy_(num_sampled[:num_requests])
        message = protocol.pack_step(
            pending.offset, self.ring.head, pending.num_rows, columns, pending.handles, pending.starts
        )
        self._outbox.append(message)
        if not self._send_outbox():
            if self._socket is not None:  # else the writer is lost, and with it everything is counted
                self._outbox.pop()
                self.ring.rewind(pending.head)
                self._drop_handles(pending.handles, "dropped_ring_full")
            return
        self.ring.worker.add("steps")
        self.ring.worker.add("rows", pending.num_rows)

    # -- requests -----------------------------------------------------------------------------------

    def _announce(self, new: Any) -> None:
        """Decide on a request, once; tell the writer of a captured one."""
        count = self.ring.worker.add
        count("requests_started")
        self._handles[new.req_id] = 0
        params, prompt = new.sampling_params, new.prompt_token_ids
        if params is None or prompt is None or new.mm_features or new.prompt_embeds is not None:
            return count("skipped_unsupported")
        if self.paused:
            return count("skipped_paused")
        wish = (params.extra_args or {}).get("specdec_tap")
        if wish is not None:
            wanted = str(wish).strip().lower() not in {"0", "false", "off", "no"}
        else:
            wanted = self.config.consent == "opt_out"
        if not wanted:
            return count("skipped_consent")
        rate = self.config.sample_rate
        if rate < 1.0 and xxhash.xxh3_64_intdigest(self._salt + new.req_id.encode()) >= rate * 2.0**64:
            return count("skipped_sample_rate")
        if self._socket is None:
            return count("dropped_writer_lost")
        head = self.ring.head
        room = None if self._outbox else self.ring.allocate(4 * len(prompt))
        if room is None:
            return count("dropped_ring_full")
        offset, end = room
        self.ring.data[offset : offset + 4 * len(prompt)].view(np.int32)[:] = prompt
        stops = set(params.stop_token_ids or ())
        if params.eos_token_id is not None:
            stops.add(params.eos_token_id)
        limit = self._max_model_len - len(prompt)
        handle = self._next_handle
        self._next_handle += 1
        lora = new.lora_request
        message = protocol.pack_json(
            protocol.NEW,
            {
                "handle": handle,
                "request_id": new.req_id[:MAX_REQUEST_ID_CHARS],
                "offset": offset,
                "num_prompt_tokens": len(prompt),
                "end": end,
                "stop_token_ids": sorted(stops),
                "max_response_tokens": min(params.max_tokens or limit, limit),
                "sampling": {
                    key: value
                    for key in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
                    if (value := getattr(params, key, None)) is not None
                },
                "lora": None if lora is None else str(lora.lora_name)[:256],
            },
        )
        self._outbox.append(message)
        if not self._send_outbox():
            if self._socket is None:
                return count("dropped_writer_lost")
            self._outbox.pop()
            self.ring.rewind(head)
            return count("dropped_ring_full")
        self._handles[new.req_id] = handle
        self._batch_ids = []
        count("requests_announced")
        return None

    def _handles_of(self, req_ids: list[str]) -> np.ndarray:
        if req_ids != self._batch_ids:
            table = self._handles
            self._batch_handles = np.array([table.get(r, 0) for r in req_ids], np.uint64)
            self._batch_ids = list(req_ids)
        return self._batch_handles

    def _drop_handles(self, handles: np.ndarray, reason: str) -> None:
        gone = {int(h) for h in handles if h} & set(self._handles.values())
        if not gone:
            return
        for req_id, handle in self._handles.items():
            if handle in gone:
                self._handles[req_id] = 0
        self._batch_ids = []
        self.ring.worker.add(reason, len(gone))
        self.ring.worker.add("dropped_announced", len(gone))
        self._outbox.append(protocol.pack_handles(protocol.DROP, sorted(gone)))

    def _hook_failed(self, where: str, err: Exception) -> None:
        self._failures += 1
        self.ring.worker.add("hook_errors")
        try:
            if self._pending is not None:
                self.ring.rewind(self._pending.head)
                self._pending = None
            live = np.array([h for h in self._handles.values() if h], np.uint64)
            self._drop_handles(live, "dropped_hook_error")
        except Exception:  # still the serving boundary: give up on capture, not on serving
            self._failures = MAX_FAILURES
        if self._failures == 1:
            logger.error(
                "capture failed in %s; its requests are dropped, serving continues", where, exc_info=err
            )
        if self._failures >= MAX_FAILURES:
            self.active = False
            logger.error(
                "capture failed %d times and is off for this process; serving continues", self._failures
            )

    # -- writer process -----------------------------------------------------------------------------

    def _start_writer(self) -> None:
        """Start a writer process with a stream of its own and wait until it has opened it."""
        stream = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"-{self._rank_label}-{os.urandom(3).hex()}"
        self.header = self.header.replace(stream=stream)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            command = [sys.executable, "-m", "specdec_tap.capture.writer_process"]
            command += [str(theirs.fileno()), str(self.ring.fd), str(self.ring.size)]
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), self.ring.fd),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        hello = {
            "config": self.config.to_json(),
            "header": self.header.to_json(),
            "max_index_tokens": self._max_index_tokens,
        }
        try:
            ours.send(protocol.pack_json(protocol.HELLO, hello))
            ours.settimeout(WRITER_START_TIMEOUT_S)
            answer = ours.recv(1 << 16)
        except OSError as err:
            ours.close()
            raise ConfigError(f"the writer process did not start ({err})") from err
        if not answer or (problem := json.loads(answer)["error"]):
            ours.close()
            raise ConfigError(
                problem if answer else "the writer process ended while it started; see its messages above"
            )
        ours.settimeout(None)
        self._process.wait()  # it forked and left at once; the writer itself is nobody's child
        self._socket = ours

    def _send_outbox(self) -> bool:
        """Send what is queued, oldest first. False when something could not be sent now."""
        channel = self._socket
        if channel is None:
            return False
        while self._outbox:
            try:
                channel.send(self._outbox[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:
                self._writer_lost()
                return False
            self._outbox.popleft()
        return True

    def _writer_lost(self) -> None:
        """The writer died: what it held is lost and counted; a new one is started in the background."""
        self._socket = None
        live = sum(1 for h in self._handles.values() if h)
        worker, writer = self.ring.worker, self.ring.writer
        ended = sum(writer.get(n) for n in WRITER_OUTCOMES)
        lost = worker.get("requests_announced") - worker.get("dropped_announced") - ended
        worker.add("dropped_writer_lost", max(lost, 0))
        worker.add("dropped_announced", max(lost, 0))
        for req_id in self._handles:
            self._handles[req_id] = 0
        self._batch_ids = []
        self._outbox.clear()
        logger.error(
            "the writer process died; %d running requests are dropped, serving continues, a new writer starts",
            live,
        )
        threading.Thread(target=self._restart_writer, name="specdec-tap-restart", daemon=True).start()

    def _restart_writer(self) -> None:
        while self.active:
            try:
                self.ring.reset()
                self.ring.worker.add("writer_restarts")
                self._start_writer()
                return
            except Exception as err:  # a thread of its own: report and try again
                logger.error(
                    "the writer process cannot be started again (%s); next try in %gs",
                    err,
                    RESTART_INTERVAL_S,
                )
                time.sleep(RESTART_INTERVAL_S)
