"""Attaches the tap to vLLM's V2 model runner (``vllm/v1/worker/gpu/model_runner.py``).

As for V1, with three differences: the aux flag is set after ``load_model`` (which otherwise asserts a
speculative configuration), ``execute_model`` also serves dummy runs, and ``sample`` returns how many
tokens each request got.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .hooks import plan_if_configured

if TYPE_CHECKING:
    from .attach import Plan
    from .tap import StepView

_PLAN = "_specdec_tap_plan"


def patch(module: ModuleType) -> None:
    """Wrap the methods of ``GPUModelRunner``; a runner without a plan runs vLLM's own code."""
    runner = module.GPUModelRunner
    runner.__init__ = _wrap_init(runner.__init__)
    runner.load_model = _wrap_load_model(runner.load_model)
    runner.execute_model = _wrap_execute(runner.execute_model)
    runner.sample = _wrap_sample(runner.sample)
    runner.sample_tokens = _wrap_sample_tokens(runner.sample_tokens)


def _wrap_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, _PLAN, plan_if_configured(vllm_config, "v2"))
        original(self, vllm_config, *args, **kwargs)

    return __init__


def _wrap_load_model(original: Any) -> Any:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        plan: Plan | None = getattr(self, _PLAN, None)
        if plan is None or plan.tap is not None:
            return result
        from .attach import attach

        plan.own_flag = self.use_aux_hidden_state_outputs
        attach(plan, self.model, self.vllm_config)
        if self.use_pp:
            from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

            eagle3_utils.verify_supports_aux_hidden_states_over_pp(self.model, "specdec-tap")
            eagle3_utils.reserve_aux_intermediate_tensor_slots(self.model)
            self.pp_handler.configure_aux_hidden_state_relay(self.model)
        self.use_aux_hidden_state_outputs = True
        return result

    return load_model


def _wrap_execute(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Plan | None = getattr(self, _PLAN, None)
        if plan is not None and plan.tap is not None:
            dummy = kwargs.get("dummy_run", args[1] if len(args) > 1 else False)
            if not dummy:
                plan.tap.on_schedule(scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _wrap_sample(original: Any) -> Any:
    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        plan: Plan | None = getattr(self, _PLAN, None)
        if plan is not None and plan.tap is not None:
            plan.tap.end_step(result[0].sampled_token_ids, result[1])
        return result

    return sample


def _wrap_sample_tokens(original: Any) -> Any:
    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Plan | None = getattr(self, _PLAN, None)
        state = self.execute_model_state
        if plan is None or state is None or state.aux_hidden_states is None:
            return original(self, *args, **kwargs)
        if plan.tap is not None:
            plan.tap.begin_step(_view(state, plan.tap_slots))
        own = None
        if plan.own_slots is not None:
            own = [state.aux_hidden_states[slot] for slot in plan.own_slots]
        self.execute_model_state = _replace(state, aux_hidden_states=own)
        self.use_aux_hidden_state_outputs = plan.own_flag
        try:
            return original(self, *args, **kwargs)
        finally:
            self.use_aux_hidden_state_outputs = True

    return sample_tokens


def _replace(state: Any, **changes: Any) -> Any:
    return (
        dataclasses.replace(state, **changes)
        if dataclasses.is_dataclass(state)
        else state._replace(**changes)
    )


def _view(state: Any, slots: tuple[int, ...]) -> StepView:
    from .tap import StepView

    batch = state.input_batch
    return StepView(
        req_ids=batch.req_ids,
        query_start_loc=batch.query_start_loc_np[: batch.num_reqs + 1],
        positions=batch.positions,
        input_ids=batch.input_ids,
        states=[*(state.aux_hidden_states[slot] for slot in slots), state.hidden_states],
    )
