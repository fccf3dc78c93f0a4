"""Methods on vLLM's workers for ``engine.collective_rpc(name)``, and the events of a worker's life."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import SpecdecTapError
from .runner_common import plan_of

if TYPE_CHECKING:
    from .attach import Plan
    from .tap import Tap

logger = logging.getLogger("vllm.specdec_tap")  # inside vLLM only the "vllm" logger has a handler


def patch_worker_base(module: ModuleType) -> None:
    """Give every worker class ``specdec_tap_control`` and ``specdec_tap_status``."""
    module.WorkerBase.specdec_tap_control = specdec_tap_control
    module.WorkerBase.specdec_tap_status = specdec_tap_status


def patch_worker(module: ModuleType) -> None:
    """Notice the end of a worker, and weights that arrive otherwise than through ``reload_weights``."""
    worker = module.Worker
    worker.shutdown = _wrap_shutdown(worker.shutdown)
    if hasattr(worker, "finish_weight_update"):
        worker.finish_weight_update = _wrap_finish(worker.finish_weight_update)


def specdec_tap_control(self: Any, action: str, rate: float | None = None) -> dict[str, Any] | None:
    """Pause, resume, set the rate, flush or rotate this worker's capture.

    Returns:
        The status after it, ``{"error": message}``, or None on a worker that does not capture.
    """
    tap = _tap_of(self)
    if tap is None:
        return None
    try:
        return tap.control(action, rate)
    except SpecdecTapError as err:  # an exception would travel through the engine
        return {"error": str(err)}
    except Exception as err:
        return _failed(tap, f"control {action!r}", err)


def specdec_tap_status(self: Any) -> dict[str, Any] | None:
    """Return what this worker knows of its capture.

    Returns:
        The status, ``{"error": message}``, or None on a worker that does not capture.
    """
    tap = _tap_of(self)
    if tap is None:
        return None
    try:
        return tap.status()
    except Exception as err:  # would travel through the engine, too
        return _failed(tap, "status", err)


def _plan_of(worker: Any) -> Plan | None:
    # A worker that failed before it had a runner is shut down, too.
    return plan_of(getattr(worker, "model_runner", None))


def _tap_of(worker: Any) -> Tap | None:
    plan = _plan_of(worker)
    return None if plan is None else plan.tap


def _failed(tap: Tap, what: str, err: Exception) -> dict[str, Any]:
    tap.note_failure(what, err)
    return {"error": f"{what} failed in this worker ({type(err).__name__}: {err}); serving continues"}


def _wrap_shutdown(original: Any) -> Any:
    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        tap = _tap_of(self)
        if tap is not None:
            try:
                tap.close()
            except Exception:  # vLLM has more to shut down; the writer seals when this process ends
                logger.exception("capture could not be ended; the shutdown continues")
        return original(self, *args, **kwargs)

    return shutdown


def _wrap_finish(original: Any) -> Any:
    @functools.wraps(original)
    def finish_weight_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        draft = getattr(self, "_weight_update_is_draft", False)
        result = original(self, *args, **kwargs)
        plan = _plan_of(self)
        if plan is not None and plan.tap is not None and not draft:
            plan.weights_changed(None)
        return result

    return finish_weight_update
