"""Attaches the tap to vLLM's V1 model runner (``vllm/v1/worker/gpu_model_runner.py``).

Four methods are wrapped: ``__init__`` (settings, refusals), the aux-layer set-up inside ``load_model``,
``execute_model`` (new and finished requests) and ``sample_tokens`` (rows on entry, sampled ids on exit).
"""

from __future__ import annotations

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
    runner._setup_eagle3_aux_hidden_state_outputs = _wrap_setup(runner._setup_eagle3_aux_hidden_state_outputs)
    runner.execute_model = _wrap_execute(runner.execute_model)
    runner._sample = _wrap_sample(runner._sample)
    runner.sample_tokens = _wrap_sample_tokens(runner.sample_tokens)


def _wrap_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, _PLAN, plan_if_configured(vllm_config, "v1"))
        original(self, vllm_config, *args, **kwargs)

    return __init__


def _wrap_setup(original: Any) -> Any:
    @functools.wraps(original)
    def setup(self: Any) -> None:
        original(self)
        plan: Plan | None = getattr(self, _PLAN, None)
        if plan is None or plan.tap is not None:
            return
        from .attach import attach

        plan.own_flag = self.use_aux_hidden_state_outputs
        attach(plan, self.get_model(), self.vllm_config)
        # From here on the model returns (hidden_states, aux_hidden_states) also in dummy and profile runs.
        self.use_aux_hidden_state_outputs = True

    return setup


def _wrap_execute(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Plan | None = getattr(self, _PLAN, None)
        if plan is not None and plan.tap is not None:
            plan.tap.on_schedule(scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _wrap_sample(original: Any) -> Any:
    @functools.wraps(original)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        plan: Plan | None = getattr(self, _PLAN, None)
        if plan is not None and plan.tap is not None:
            plan.tap.end_step(output.sampled_token_ids, None)
        return output

    return _sample


def _wrap_sample_tokens(original: Any) -> Any:
    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Plan | None = getattr(self, _PLAN, None)
        state = self.execute_model_state
        if plan is None or state is None or state.aux_hidden_states is None:
            return original(self, *args, **kwargs)
        if plan.tap is not None:
            plan.tap.begin_step(_view(self, state, plan.tap_slots))
        # The server's own drafter gets what it would get without the tap.
        own = None
        if plan.own_slots is not None:
            own = [state.aux_hidden_states[slot] for slot in plan.own_slots]
        self.execute_model_state = state._replace(aux_hidden_states=own)
        self.use_aux_hidden_state_outputs = plan.own_flag
        try:
            return original(self, *args, **kwargs)
        finally:
            self.use_aux_hidden_state_outputs = True

    return sample_tokens


def _view(self: Any, state: Any, slots: tuple[int, ...]) -> StepView:
    from .tap import StepView

    batch = self.input_batch
    num_requests = batch.num_reqs
    return StepView(
        req_ids=batch.req_ids,
        query_start_loc=self.query_start_loc.np[: num_requests + 1],
        positions=self.positions,
        input_ids=self.input_ids.gpu,
        states=[*(state.aux_hidden_states[slot] for slot in slots), state.hidden_states],
    )
