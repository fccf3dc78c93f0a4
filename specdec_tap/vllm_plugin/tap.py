"""The tap inside a vLLM worker: on the serving path, so every method here is short and never waits.

Order of calls for one engine step, all on the worker's thread::

    on_schedule(scheduler_output)   before the forward: who is new, who is finished
    on_step(make_step)              after sampling: copy rows and sampled ids into the ring, publish them

Any exception is caught at this boundary (:func:`guarded`): it is counted, the requests it may have
spoilt are dropped whole, and serving goes on. A tap that keeps failing turns itself off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ..capture import protocol
from ..capture.ring import WRITER_OUTCOMES, Ring
from ..config import TapConfig
from ..errors import ConfigError
from ..shards.layout import MAX_REQUEST_ID_CHARS, ShardHeader
from .channel import WriterChannel
from .runner_common import EngineStep
from .staging import StepRows, make_stager

logger = logging.getLogger("vllm.specdec_tap")  # inside vLLM only the "vllm" logger has a handler

MAX_FAILURES = 20
SILENT_REQUESTS = 32
"""After so many finished requests without a single captured step, something is wrong."""
WARMUP_PREFIXES = ("_warmup_", "_v2_mixed_warmup")
GIVEN_SPANS_KEY = "specdec_tap_spans"
SAMPLING_FACTS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")


def parse_spans(text: str, num_tokens: int) -> list[tuple[int, int]]:
    """Response ranges of a request whose answers are in its prompt.

    Raises:
        ValueError: They are not sorted, disjoint, and inside ``[1, num_tokens]``.

    Example:
        >>> parse_spans("10-40,60-90", 90)
        [(10, 40), (60, 90)]
    """
    spans = [(int(a), int(b)) for a, _, b in (part.partition("-") for part in text.split(","))]
    edges = [0, *(edge for span in spans for edge in span)]
    if edges != sorted(edges) or spans[0][0] < 1 or edges[-1] > num_tokens:
        raise ValueError(f"{text[:80]!r} are no ranges of {num_tokens:,} tokens")
    if any(a == b for a, b in spans):
        raise ValueError(f"{text[:80]!r} holds an empty range")
    return spans


@dataclass(kw_only=True, slots=True)
class Limits:
    """What the engine may do at most; sizes the ring and the index of prefixes."""

    max_rows: int
    """Rows of one step: the scheduler's token budget."""
    max_requests: int
    """Requests of one step."""
    max_columns: int
    """Tokens that one request can get from one step: 1 + draft tokens."""
    max_model_len: int
    """Prompt + response, in tokens."""
    cache_tokens: Callable[[], int]
    """Tokens that vLLM's prefix cache holds: 0 when it is off, and until its size is known."""
    cache_block_tokens: int
    """Tokens of one block of that cache."""


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
        header: What every shard of this worker's streams will say of itself.
        limits: Of the engine.
        device: Where the model runs.

    Raises:
        ConfigError: The ring cannot hold one step, or the writer process cannot start.
    """

    def __init__(self, config: TapConfig, header: ShardHeader, limits: Limits, device: torch.device) -> None:
        self.config, self.limits = config, limits
        self.rate = config.sample_rate
        self.paused = False
        self.active = True
        self._layers, self._hidden = header.num_aux + 1, header.hidden_size
        self._item = header.bits_dtype.itemsize
        step = self._layout(limits.max_rows, limits.max_requests, limits.max_columns).offsets()[-1]
        least = step + 4 * limits.max_model_len
        size = config.ring_bytes or max(4 * least, 64 << 20)
        if size < least:
            raise ConfigError(
                f"ring_bytes is {size:,} but one step of {limits.max_rows:,} tokens takes {least:,}; set it "
                f"to {4 * least:,} or leave it at 0"
            )
        self.ring = Ring.create(size)
        self._ring_longs, self._ring_ints = self.ring.data.view(np.uint64), self.ring.data.view(np.int32)
        self._count = self.ring.worker.add
        self._stager = make_stager(self.ring, getattr(torch, header.dtype), step, device)
        self._salt = os.urandom(8)
        self._handles: dict[str, int] = {}  # request id -> handle; 0: not captured
        self._next_handle = 1
        self._batch_ids: list[str] = []
        self._batch_handles = np.zeros(0, np.uint64)
        self._batch_captured = 0
        self._failures = 0
        self._loss_counted = False
        self._num_silent = 0
        self._num_controls = 0
        self._cache_told = False
        hello = weakref.WeakMethod(self._hello)
        self.channel = WriterChannel(self.ring, header, lambda: hello()())  # type: ignore[misc]
        # An engine that is dropped without a word lets its writer seal, too.
        weakref.finalize(self, self.channel.close)

    def close(self) -> None:
        """The engine shuts down: no more steps; the writer seals what it holds."""
        self.active = False
        self.channel.close()

    def _hello(self) -> dict[str, Any]:
        limits = self.limits
        return {
            "config": self.config.to_json(),
            "state": self._state(),
            "cache_tokens": limits.cache_tokens(),
            "cache_block_tokens": limits.cache_block_tokens,
        }

    def _layout(self, num_rows: int, num_requests: int, num_columns: int) -> protocol.StepLayout:
        return protocol.StepLayout(
            self._layers, self._hidden, self._item, num_rows, num_requests, num_columns
        )

    # -- hooks --------------------------------------------------------------------------------------

    @guarded
    def on_schedule(self, scheduler_output: Any) -> None:
        """Note new and finished requests before the forward of this step."""
        channel = self.channel
        if channel.lost:
            self._writer_lost()
        if not self._cache_told:  # only now is the engine's cache sized
            self._cache_told = True
            self._control({"action": "cache", "tokens": self.limits.cache_tokens()})
        finished = scheduler_output.finished_req_ids
        if finished:
            handles = [h for r in finished if (h := self._handles.get(r, 0))]
            for message in protocol.pack_handles(protocol.FINISH, handles):
                channel.post(message)
            # Only now: until the writer is told, a failure here must still drop them.
            for req_id in finished:
                self._handles.pop(req_id, None)
            self._watch_silence(len(handles))
        for new in scheduler_output.scheduled_new_reqs:
            # The V2 runner sends a resumed request as a new one, and warms up with made-up requests.
            if new.req_id not in self._handles and not new.req_id.startswith(WARMUP_PREFIXES):
                self._announce(new)
        channel.pump()

    @guarded
    def on_step(self, make_step: Callable[[], EngineStep]) -> None:
        """Copy this step's rows and what was sampled after them into the ring, and publish the step.

        Args:
            make_step: Collects the step from the runner; an exception in it is caught like any other here.
        """
        view = make_step()
        handles = self._handles_of(view.req_ids)
        num_requests, starts, sampled = len(handles), view.query_start_loc, view.sampled
        captured = self._batch_captured
        if captured == 0:
            return
        num_rows = int(starts[-1])
        rows: np.ndarray | None = None
        if captured != num_requests:
            counts = np.diff(starts)
            rows = np.flatnonzero(np.repeat(handles != 0, counts))
            starts = np.concatenate([[0], np.cumsum(np.where(handles != 0, counts, 0))])
            num_rows = len(rows)
        if num_rows == 0 or self.channel.lost:
            return
        columns = sampled.shape[1]
        if sampled.shape[0] < num_requests or len(starts) != num_requests + 1:
            raise RuntimeError(
                f"{num_requests} requests, but sampled ids {list(sampled.shape)} and {len(starts)} row starts"
            )
        layout = self._layout(num_rows, num_requests, columns)
        at = layout.offsets()
        room = self.ring.allocate(at[-1])
        if room is None:  # the writer is behind: it is not waited for
            self._give_up(handles, "dropped_ring_full")
            self.channel.pump()
            return
        offset, end = room
        valid: torch.Tensor | np.ndarray | None = view.num_sampled
        if valid is None:
            valid = np.full(num_requests, -1, np.int32)
            if view.unfinished is not None:
                valid[view.unfinished] = 0
        ticket = self._stager.stage(
            StepRows(layout, view.states, view.positions, view.input_ids, rows, sampled, valid), at, offset
        )
        begin = (offset + at[5]) // 8
        self._ring_longs[begin : begin + num_requests] = handles
        begin = (offset + at[6]) // 4
        self._ring_ints[begin : begin + num_requests + 1] = starts
        step = protocol.Step(offset, end, num_rows, num_requests, columns)
        self.channel.post(protocol.pack_step(step), ticket)
        self.channel.pump()
        self._count("steps")
        self._count("rows", num_rows)

    @guarded
    def no_states(self) -> None:
        """A step came without aux states although the model was told to give them."""
        raise RuntimeError("the model gave no aux hidden states for this step")

    # -- requests -----------------------------------------------------------------------------------

    def _announce(self, new: Any) -> None:
        """Decide on a request, once; tell the writer of a captured one."""
        self._count("requests_started")
        self._handles[new.req_id] = 0
        try:
            reason = self._why_not(new) or self._introduce(new)
        except Exception as err:  # costs this request only
            self._count("dropped_hook_error")  # first: it is told apart from one that is still captured
            self._note_failure("_announce", err)
            return
        if reason is not None:
            self._count(reason)

    def _introduce(self, new: Any) -> str | None:
        """Send a request's facts to the writer; return the counter of why it could not, or None."""
        params, prompt = new.sampling_params, new.prompt_token_ids
        given: list[tuple[int, int]] = []
        if self.config.given_answers and (text := (params.extra_args or {}).get(GIVEN_SPANS_KEY)):
            try:
                given = parse_spans(str(text), len(prompt))
            except ValueError:
                return "skipped_unsupported"
        stops = set(params.stop_token_ids or ())
        if params.eos_token_id is not None:
            stops.add(params.eos_token_id)
        size = 4 * (len(prompt) + len(stops))
        room = self.ring.allocate(size)
        if room is None:
            return "dropped_ring_full"
        offset, end = room
        ids = self.ring.data[offset : offset + size].view(np.int32)
        ids[: len(prompt)] = prompt
        ids[len(prompt) :] = sorted(stops)
        limit = self.limits.max_model_len - len(prompt)
        handle = self._next_handle
        self._next_handle += 1
        lora = new.lora_request
        message = {
            "handle": handle,
            "request_id": new.req_id[:MAX_REQUEST_ID_CHARS],
            "offset": offset,
            "end": end,
            "num_prompt_tokens": len(prompt),
            "num_stop_tokens": len(stops),
            "max_response_tokens": min(params.max_tokens or limit, limit),
            "sampling": {
                key: value for key in SAMPLING_FACTS if (value := getattr(params, key, None)) is not None
            },
            "lora": None if lora is None else str(lora.lora_name)[:256],
            "given_spans": given,
            # Two adapters may have had one name at different times.
            "salt": "" if lora is None else f"{lora.lora_int_id} {lora.lora_name} {lora.lora_path}"[:4096],
        }
        self.channel.post(protocol.pack_json(protocol.NEW, message))
        self._handles[new.req_id] = handle
        self._batch_ids = []
        self._count("requests_announced")
        return None

    def _why_not(self, new: Any) -> str | None:
        """Return the counter of the reason why a request is not captured, or None."""
        params = new.sampling_params
        if params is None or new.prompt_token_ids is None or new.mm_features:
            return "skipped_unsupported"
        if new.prompt_embeds is not None:
            return "skipped_unsupported"
        if self.paused:
            return "skipped_paused"
        wish = (params.extra_args or {}).get("specdec_tap")
        if wish is None:
            wanted = self.config.consent == "opt_out"
        else:
            wanted = str(wish).strip().lower() not in {"0", "0.0", "false", "off", "no"}
        if not wanted:
            return "skipped_consent"
        if self.rate < 1.0:
            share = xxhash.xxh3_64_intdigest(self._salt + new.req_id.encode("utf-8", "replace")) / 2.0**64
            if share >= self.rate:
                return "skipped_sample_rate"
        if self.channel.lost:
            return "dropped_writer_lost"
        return None

    def _handles_of(self, req_ids: list[str]) -> np.ndarray:
        if req_ids != self._batch_ids:
            table = self._handles
            self._batch_handles = np.array([table.get(r, 0) for r in req_ids], np.uint64)
            self._batch_captured = int(np.count_nonzero(self._batch_handles))
            self._batch_ids = list(req_ids)
        return self._batch_handles

    def _give_up(self, handles: np.ndarray, reason: str) -> None:
        """Stop capturing announced requests; the writer drops and counts each unless it is done with it."""
        gone = {int(h) for h in handles if h}
        for req_id, handle in self._handles.items():
            if handle in gone:
                self._handles[req_id] = 0
        self._batch_ids = []
        self._count("given_up", len(gone))
        for message in protocol.pack_handles(protocol.DROP, sorted(gone), reason):
            self.channel.post(message)

    def _live(self) -> np.ndarray:
        return np.array([h for h in self._handles.values() if h], np.uint64)

    # -- trouble ------------------------------------------------------------------------------------

    def hook_failed(self, where: str, err: Exception) -> None:
        """Count an exception around a hook and drop what it may have spoilt; never raises."""
        if self.active:
            self._hook_failed(where, err)

    def note_failure(self, where: str, err: Exception) -> None:
        """Count an exception that cost no request; never raises."""
        try:
            self._note_failure(where, err)
        except Exception:  # the serving boundary, as below
            logger.exception("a failure in %s could not be counted; serving continues", where)

    def _hook_failed(self, where: str, err: Exception) -> None:
        try:
            self._note_failure(where, err)
            self._give_up(self._live(), "dropped_hook_error")
            if self._failures >= MAX_FAILURES:
                self._turn_off(f"capture failed {self._failures} times")
        except Exception:  # still the serving boundary: give up on capture, not on serving
            self.active = False
            logger.exception("capture is off for this process: it failed while it failed; serving continues")
            with contextlib.suppress(Exception):
                self._tell_state()

    def _note_failure(self, where: str, err: Exception) -> None:
        self._failures += 1
        self._count("hook_errors")
        if self._failures == 1:
            logger.error(
                "capture failed in %s; what it may have spoilt is dropped, serving continues",
                where,
                exc_info=err,
            )

    def _turn_off(self, reason: str) -> None:
        self.active = False
        self._give_up(self._live(), "dropped_hook_error")
        logger.error("capture is off for this process: %s; serving continues", reason)
        self._tell_state()

    def _watch_silence(self, num_finished: int) -> None:
        """Hooks that are never called (a vLLM that changed) must not look like a quiet server."""
        if not num_finished or self.ring.worker.get("steps"):
            return
        self._num_silent += num_finished
        if self._num_silent >= SILENT_REQUESTS:
            self._turn_off(f"{self._num_silent} requests finished and no step of theirs reached the tap")

    def _writer_lost(self) -> None:
        """The writer died: what it held is lost and counted once; take the new one over when it is there."""
        if not self._loss_counted:
            self._loss_counted = True
            ended = sum(self.ring.writer.get(name) for name in WRITER_OUTCOMES)
            worker = self.ring.worker
            # What earlier writers lost was announced too and has no outcome.
            lost = worker.get("requests_announced") - worker.get("announced_lost") - ended
            self._count("announced_lost", lost)
            self._count("dropped_writer_lost", lost)
            self._handles = dict.fromkeys(self._handles, 0)
            self._batch_ids = []
            logger.error(
                "the writer process died; %d requests are dropped, serving continues, a new writer starts",
                lost,
            )
        if self.channel.adopt():
            self._loss_counted = False
            self._num_controls = self.ring.writer.get("controls_done")
            logger.info("a new writer process captures to stream %s", self.channel.header.stream)

    # -- control, from outside the serving path -------------------------------------------------------

    def on_weights_changed(self, revision: str) -> None:
        """Other weights give other states: running requests are dropped and a new stream begins.

        Waits until the old stream is sealed; the engine is reloading weights anyway.
        """
        if not self.active:
            return
        if self.channel.lost:
            self._writer_lost()
        self._give_up(self._live(), "dropped_weights_changed")
        header = self.channel.header
        # The checkpoint's fingerprint is not that of the new weights.
        target = dataclasses.replace(header.target, revision=revision, tables_sha256=None, layers_sha256=None)
        self.channel.replace(header.replace(target=target))
        self._loss_counted = False
        logger.info("the weights changed; capture goes on in stream %s", self.channel.header.stream)

    def control(self, action: str, rate: float | None = None) -> dict[str, Any]:
        """Pause, resume, change the rate, flush or rotate.

        Args:
            action: ``pause`` and ``resume`` (new requests only), ``rate``, ``flush`` or ``rotate``.
            rate: Share of requests to capture from now on, 0 to 1; for ``rate``.

        Returns:
            :meth:`status` after it. ``flush`` and ``rotate`` are done when its ``controls_done`` reaches
            ``controls_sent``.

        Raises:
            ConfigError: Unknown action, or a rate outside 0 to 1.
        """
        if action == "rate":
            if not isinstance(rate, (int, float)) or not 0.0 <= rate <= 1.0:
                raise ConfigError(f"rate is {rate!r}; expected a number from 0 to 1")
            self.rate = float(rate)
        elif action in ("pause", "resume"):
            self.paused = action == "pause"
        elif action in ("flush", "rotate"):
            self._control({"action": action})
        else:
            raise ConfigError(
                f"action is {action!r}; expected one of 'pause', 'resume', 'rate', 'flush', 'rotate'"
            )
        self._tell_state()
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return what this worker knows of itself, as JSON-able values."""
        ring = self.ring
        return {
            "stream": self.channel.header.stream,
            "dp_rank": self.channel.header.engine.get("dp_rank", 0),
            **self._state(),
            "writer_lost": self.channel.lost,
            "live_requests": len(self._live()),
            "known_requests": len(self._handles),
            "backlog_messages": self.channel.backlog,
            "ring_bytes": ring.size,
            "ring_used_bytes": ring.used_bytes_now(),
            "controls_sent": self._num_controls,
            "controls_done": ring.writer.get("controls_done"),
            "worker": ring.worker.snapshot(),
            "writer": ring.writer.snapshot(),
        }

    def _state(self) -> dict[str, Any]:
        return {"active": self.active, "paused": self.paused, "sample_rate": self.rate}

    def _tell_state(self) -> None:
        self._control({"action": "state", **self._state()})

    def _control(self, message: dict[str, Any]) -> None:
        if self.channel.lost:
            return
        self._num_controls += 1
        self.channel.post(protocol.pack_json(protocol.CONTROL, message))
        self.channel.pump()
