"""Attaches the tap to vLLM's V1 model runner (``vllm/v1/worker/gpu_model_runner.py``)."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from .runner_common import (
    EngineStep,
    plan_of,
    wrap_init,
    wrap_reload_weights,
    wrap_sample,
    wrap_sample_tokens,
)


def patch(module: ModuleType) -> None:
    """Wrap the methods of ``GPUModelRunner``; a runner without a plan runs vLLM's own code."""
    runner = module.GPUModelRunner
    runner.__init__ = wrap_init(runner.__init__, "v1")
    runner._setup_eagle3_aux_hidden_state_outputs = _wrap_setup(runner._setup_eagle3_aux_hidden_state_outputs)
    runner.execute_model = _wrap_execute(runner.execute_model)
    runner._sample = wrap_sample(runner._sample, _step)
    runner.sample_tokens = wrap_sample_tokens(
        runner.sample_tokens, lambda state, aux: state._replace(aux_hidden_states=aux)
    )
    runner.reload_weights = wrap_reload_weights(runner.reload_weights)


def _wrap_setup(original: Any) -> Any:
    @functools.wraps(original)
    def setup(self: Any) -> None:
        original(self)
        plan = plan_of(self)
        if plan is None or plan.attached:
            return
        from .attach import attach

        attach(plan, self.get_model(), self)
        # From here on the model returns (hidden_states, aux_hidden_states) also in dummy and profile runs.
        self.use_aux_hidden_state_outputs = plan.attached or plan.own_flag

    return setup


def _wrap_execute(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        plan = plan_of(self)
        if plan is not None and plan.tap is not None:
            plan.tap.on_schedule(scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _step(self: Any, state: Any, slots: tuple[int, ...], result: Any) -> EngineStep:
    batch = self.input_batch
    num_requests = batch.num_reqs
    aux = state.aux_hidden_states
    return EngineStep(
        req_ids=batch.req_ids,
        query_start_loc=self.query_start_loc.np[: num_requests + 1],
        positions=self.positions,
        input_ids=self.input_ids.gpu,
        states=[*[aux[slot] for slot in slots], state.hidden_states],
        sampled=result.sampled_token_ids,
        unfinished=self.discard_request_mask.np[:num_requests],
    )
