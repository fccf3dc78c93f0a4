"""What is wrapped in the same way in both of vLLM's model runners."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .hooks import plan_if_configured

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .attach import Plan

PLAN = "_specdec_tap_plan"


class EngineStep(NamedTuple):
    """One step of either model runner, rows not yet overwritten by the next forward."""

    req_ids: list[str]
    """Batch order."""
    query_start_loc: np.ndarray
    """int32 ``[R + 1]`` on the host."""
    positions: torch.Tensor
    """int64 ``[>= rows]``, as the forward used them."""
    input_ids: torch.Tensor
    """``[>= rows]``, as the forward used them."""
    states: list[torch.Tensor]
    """One ``[>= rows, H]`` tensor per aux layer, then the post-norm final state. Rows past
    ``query_start_loc[R]`` are padding."""
    sampled: torch.Tensor
    """``[>= R, S]`` token ids; without ``num_sampled``, -1 marks rejected drafts."""
    num_sampled: torch.Tensor | None = None
    """``[>= R]``: how many of them are valid (V2), or None (V1)."""
    unfinished: np.ndarray | None = None
    """bool ``[R]`` on the host (V1): prefill chunks that are not the last one, so that what was sampled for
    them means nothing."""


def plan_of(runner: Any) -> Plan | None:
    """Return the runner's plan; None when this engine is not tapped."""
    return getattr(runner, PLAN, None)


def wrap_init(original: Any, name: str) -> Any:
    """Wrap ``__init__``: read the settings and refuse what cannot be tapped, before any weight is loaded."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, PLAN, plan_if_configured(vllm_config, name))
        original(self, vllm_config, *args, **kwargs)

    return __init__


def wrap_sample(original: Any, step_of: Callable[[Any, Any, tuple[int, ...], Any], EngineStep]) -> Any:
    """Wrap what samples: by then the step is complete, and the next forward has overwritten nothing.

    Args:
        original: Returns the sampled ids.
        step_of: Makes an ``EngineStep`` from the runner, the forward's state, the tap's aux slots and that
            result.
    """

    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        plan = plan_of(self)
        if plan is not None and plan.tap is not None and plan.state is not None:
            state, plan.state = plan.state, None
            plan.tap.on_step(functools.partial(step_of, self, state, plan.tap_slots, result))
        return result

    return sample


def wrap_sample_tokens(original: Any, replace: Callable[[Any, Any], Any]) -> Any:
    """Wrap ``sample_tokens``: the server's own drafter must get what it would get without the tap.

    Args:
        original: The method.
        replace: Returns a copy of the forward's state with other aux hidden states.
    """

    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = plan_of(self)
        if plan is None or not plan.attached:
            return original(self, *args, **kwargs)
        try:
            has_aux = _split_states(self, plan, replace)
        except Exception as err:  # the sampler then gets the forward's state as it is
            plan.state = None
            plan.hook_failed("sample_tokens", err)
            has_aux = True
        if not has_aux:
            return original(self, *args, **kwargs)
        self.use_aux_hidden_state_outputs = plan.own_flag
        try:
            return original(self, *args, **kwargs)
        finally:
            self.use_aux_hidden_state_outputs = True

    return sample_tokens


def _split_states(runner: Any, plan: Plan, replace: Callable[[Any, Any], Any]) -> bool:
    """Keep the forward's state for the tap and leave the runner one with its own drafter's aux states.

    Returns:
        Whether the forward gave aux states.
    """
    state = runner.execute_model_state
    if state is None:
        return False
    aux = state.aux_hidden_states
    if aux is None:
        if plan.tap is not None and state.hidden_states is not None:
            plan.tap.no_states()
        return False
    own = None if plan.own_slots is None else [aux[slot] for slot in plan.own_slots]
    runner.execute_model_state = replace(state, own)
    plan.state = state
    return True


def wrap_reload_weights(original: Any) -> Any:
    """Wrap ``reload_weights``: states of other weights belong in another stream."""

    @functools.wraps(original)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        plan = plan_of(self)
        if plan is not None and plan.tap is not None:
            path = kwargs.get("weights_path", args[1] if len(args) > 1 else None)
            plan.weights_changed(str(path) if path else None)
        return result

    return reload_weights
