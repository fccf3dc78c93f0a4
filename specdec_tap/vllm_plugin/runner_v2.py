"""Attaches the tap to vLLM's V2 model runner (``vllm/v1/worker/gpu/model_runner.py``).

As for V1, with three differences: the aux flag is set after ``load_model`` (which otherwise asserts a
speculative configuration), ``execute_model`` also serves dummy runs, and ``sample`` returns how many
tokens each request got.
"""

from __future__ import annotations

import dataclasses
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
    runner.__init__ = wrap_init(runner.__init__, "v2")
    runner.load_model = _wrap_load_model(runner.load_model)
    runner.execute_model = _wrap_execute(runner.execute_model)
    runner.sample = wrap_sample(runner.sample, _step)
    runner.sample_tokens = wrap_sample_tokens(runner.sample_tokens, _replace)
    runner.reload_weights = wrap_reload_weights(runner.reload_weights)


def _wrap_load_model(original: Any) -> Any:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        plan = plan_of(self)
        if plan is None or plan.attached:
            return result
        from .attach import attach, refuse

        if self.use_pp and not _relays_aux_states(self.model):
            refuse(
                plan.config,
                f"{type(self.model).__name__} does not relay aux hidden states between pipeline stages, and "
                f"pipeline_parallel_size is {self.parallel_config.pipeline_parallel_size}; use tensor "
                "parallelism to capture",
            )
            return result
        attach(plan, self.model, self)
        if plan.attached and self.use_pp:
            _relay_aux_states(self)
        self.use_aux_hidden_state_outputs = plan.attached or plan.own_flag
        return result

    return load_model


def _relays_aux_states(model: Any) -> bool:
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    try:
        eagle3_utils.verify_supports_aux_hidden_states_over_pp(model, "capture")
    except ValueError:
        return False
    return True


def _relay_aux_states(self: Any) -> None:
    """Make the pipeline stages hand on aux states, as ``load_model`` does for a drafter of the server."""
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    eagle3_utils.reserve_aux_intermediate_tensor_slots(self.model)
    self.pp_handler.configure_aux_hidden_state_relay(self.model)
    if not self.is_first_pp_rank:  # load_model made them without room for aux states
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )


def _wrap_execute(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        plan = plan_of(self)
        if plan is not None and plan.tap is not None:
            dummy = kwargs.get("dummy_run", args[1] if len(args) > 1 else False)
            if not dummy:
                plan.tap.on_schedule(scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _replace(state: Any, aux: Any) -> Any:
    if dataclasses.is_dataclass(state):
        return dataclasses.replace(state, aux_hidden_states=aux)  # type: ignore[type-var]  # an instance
    return state._replace(aux_hidden_states=aux)


def _step(self: Any, state: Any, slots: tuple[int, ...], result: Any) -> EngineStep:
    batch = state.input_batch
    aux = state.aux_hidden_states
    return EngineStep(
        req_ids=batch.req_ids,
        query_start_loc=batch.query_start_loc_np[: batch.num_reqs + 1],
        positions=batch.positions,
        input_ids=batch.input_ids,
        states=[*[aux[slot] for slot in slots], state.hidden_states],
        sampled=result[0].sampled_token_ids,
        num_sampled=result[1],
    )
