"""Methods on vLLM's workers for ``engine.collective_rpc(name)``, and the events of a worker's life."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ..errors import SpecdecTapError
from .runner_common import plan_of


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
    plan = plan_of(self.model_runner)
    if plan is None or plan.tap is None:
        return None
    try:
        return plan.tap.control(action, rate)
    except SpecdecTapError as err:  # an exception would travel through the engine
        return {"error": str(err)}


def specdec_tap_status(self: Any) -> dict[str, Any] | None:
    """Return what this worker knows of its capture, or None when it does not capture."""
    plan = plan_of(self.model_runner)
    return None if plan is None or plan.tap is None else plan.tap.status()


def _wrap_shutdown(original: Any) -> Any:
    @functools.wraps(original)
    def shutdown(self: Any) -> None:
        plan = plan_of(self.model_runner)
        if plan is not None and plan.tap is not None:
            plan.tap.close()
        original(self)

    return shutdown


def _wrap_finish(original: Any) -> Any:
    @functools.wraps(original)
    def finish_weight_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        draft = getattr(self, "_weight_update_is_draft", False)
        result = original(self, *args, **kwargs)
        plan = plan_of(self.model_runner)
        if plan is not None and plan.tap is not None and not draft:
            plan.weights_changed(None)
        return result

    return finish_weight_update
