"""A vLLM plugin for tests: breaks parts of the tap when a request asks for it.

With this folder on ``PYTHONPATH`` vLLM loads it beside the tap. A request with
``vllm_xargs: {"fault": "NAME", "times": N}`` makes the next N calls of that part fail.
"""

from __future__ import annotations

import functools
from typing import Any

FAULTS: dict[str, int] = {}


def register() -> None:
    """Wrap the parts; each is called inside a hook."""
    from specdec_tap.capture.ring import Ring
    from specdec_tap.vllm_plugin import runner_v1, runner_v2
    from specdec_tap.vllm_plugin.channel import WriterChannel
    from specdec_tap.vllm_plugin.staging import CpuStager
    from specdec_tap.vllm_plugin.tap import Tap

    if hasattr(Tap.on_schedule, "_faulty"):
        return
    for name in ("_why_not", "_introduce", "_handles_of", "_give_up", "_note_failure", "_watch_silence"):
        setattr(Tap, name, failing(name, getattr(Tap, name)))
    CpuStager.stage = failing("stage", with_nan(CpuStager.stage))
    WriterChannel.post = failing("post", WriterChannel.post)
    WriterChannel.pump = failing("pump", WriterChannel.pump)
    Ring.allocate = failing("allocate", Ring.allocate)
    for runner in (runner_v1, runner_v2):
        runner._step = failing("step", runner._step)
    Tap.on_schedule = asking(Tap.on_schedule)


def due(name: str) -> bool:
    """Use up one planted fault of this name."""
    left = FAULTS.get(name, 0)
    if left:
        FAULTS[name] = left - 1
    return left > 0


def failing(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if due(name):
            raise RuntimeError(f"planted in {name}")
        return method(*args, **kwargs)

    return call


def with_nan(stage: Any) -> Any:
    """Spoil a copy of the last layer's rows, as a broken kernel would."""

    @functools.wraps(stage)
    def call(self: Any, step: Any, *args: Any) -> Any:
        if due("nan"):
            step = step._replace(states=[*step.states[:-1], step.states[-1] * float("nan")])
        return stage(self, step, *args)

    return call


def asking(on_schedule: Any) -> Any:
    """Look for requests that ask for a fault, before the tap sees them."""

    @functools.wraps(on_schedule)
    def call(self: Any, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            if name := extra.get("fault"):
                FAULTS[name] = int(extra.get("times", 1))
        on_schedule(self, scheduler_output)

    call._faulty = True
    return call
