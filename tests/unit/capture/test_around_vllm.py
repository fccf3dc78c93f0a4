"""What is wrapped around vLLM's own methods: each runs once, as it was called, whatever the tap does."""

from __future__ import annotations

import types
from pathlib import Path
from types import SimpleNamespace as Object
from typing import Any

import pytest
from helpers.fake_engine import FakeRunner, make_tap, new_request, schedule

from specdec_tap import open_shards
from specdec_tap.config import TapConfig
from specdec_tap.vllm_plugin import rpc
from specdec_tap.vllm_plugin.attach import Plan
from specdec_tap.vllm_plugin.offline import left_out
from specdec_tap.vllm_plugin.runner_common import PLAN, wrap_reload_weights, wrap_sample, wrap_sample_tokens

HIDDEN = 16
V1 = FakeRunner("v1", HIDDEN)


@pytest.fixture
def tap(tmp_path):
    one = make_tap(tmp_path / "shards", hidden_size=HIDDEN)
    yield one
    one.channel.close()


def planned(tap: Any = None, **fields: Any) -> Plan:
    plan = Plan(TapConfig(dir=Path("shards")), "v1", attached=True, tap=tap)
    for name, value in fields.items():
        setattr(plan, name, value)
    return plan


def planted(*args: object, **kwargs: object) -> None:
    raise RuntimeError("planted")


def outcomes(tap: Any) -> dict[str, int]:
    """Counters of worker and writer; checks that they add up."""
    status, out = tap.status(), {}
    for side in ("worker", "writer"):
        for name, value in status[side].items():
            out[name] = out.get(name, 0) + value
    ended = sum(v for k, v in out.items() if k == "requests_sealed" or k.startswith(("dropped_", "skipped_")))
    assert out["requests_started"] == ended
    return out


# -- sample_tokens ------------------------------------------------------------------------------------------


class Sampler:
    """A runner whose ``sample_tokens`` notes what it was given."""

    def __init__(self, plan: Plan, aux: Any) -> None:
        setattr(self, PLAN, plan)
        self.execute_model_state = Object(aux_hidden_states=aux, hidden_states="final")
        self.use_aux_hidden_state_outputs = True
        self.calls: list[tuple[Any, ...]] = []

    def sample_tokens(self, *args: Any, **kwargs: Any) -> str:
        aux = self.execute_model_state.aux_hidden_states
        self.calls.append((args, kwargs, aux, self.use_aux_hidden_state_outputs))
        return "sampled"


def with_aux(state: Any, aux: Any) -> Object:
    return Object(aux_hidden_states=aux, hidden_states=state.hidden_states)


def test_the_drafter_gets_its_own_states_and_the_tap_all() -> None:
    plan = planned(own_slots=(1,), own_flag=True)
    runner = Sampler(plan, ["a", "b", "c"])
    state = runner.execute_model_state
    assert wrap_sample_tokens(Sampler.sample_tokens, with_aux)(runner, "grammar", key=1) == "sampled"
    assert runner.calls == [(("grammar",), {"key": 1}, ["b"], True)]
    assert plan.state is state


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("drafter", [True, False])
@pytest.mark.parametrize(
    ("aux", "replace"),
    [
        pytest.param(["a"], with_aux, id="fewer aux states than slots"),
        pytest.param(["a", "b", "c"], planted, id="another form of state"),
        pytest.param(None, with_aux, id="no aux states"),
    ],
)
def test_sampling_runs_once_with_its_arguments(captures, drafter, aux, replace, tmp_path, caplog) -> None:
    tap = make_tap(tmp_path / "shards", hidden_size=HIDDEN) if captures else None
    plan = planned(tap, own_slots=(2,) if drafter else None, own_flag=drafter)
    fails = aux is not None and (replace is planted or drafter)
    for call in range(1, 4):
        runner = Sampler(plan, aux)
        assert wrap_sample_tokens(Sampler.sample_tokens, replace)(runner, "grammar", key=1) == "sampled"
        ((args, kwargs, got, flag),) = runner.calls
        assert (args, kwargs) == (("grammar",), {"key": 1})
        if fails:
            assert got == aux and plan.state is None
        if aux is not None:
            assert flag is drafter
        assert runner.use_aux_hidden_state_outputs is True
        if tap is not None and (fails or aux is None):
            assert tap.ring.worker.get("hook_errors") == call
    if fails and not captures:
        assert caplog.text.count("capture failed in sample_tokens") == 1
    if tap is not None:
        tap.channel.close()


def test_a_state_that_cannot_be_handed_over_drops_the_running_requests(tap) -> None:
    tap.on_schedule(schedule([new_request("a", [1]), new_request("b", [1])]))
    plan = planned(tap)

    class Inner(Sampler):
        sample = wrap_sample(lambda self: "ids", planted)  # no step is made of a state that was not kept

        def sample_tokens(self) -> Any:
            return self.sample()

    runner = Inner(plan, ["a"])
    assert wrap_sample_tokens(Inner.sample_tokens, planted)(runner) == "ids"
    tap.on_schedule(schedule(finished=["a", "b"]))
    tap.channel.finish()
    got = outcomes(tap)
    assert (got["dropped_hook_error"], got["hook_errors"]) == (2, 1)


def test_a_runner_that_lost_its_state_attribute_still_samples(tap) -> None:
    runner = Object(**{PLAN: planned(tap)})
    assert wrap_sample_tokens(lambda self: "sampled", with_aux)(runner) == "sampled"
    assert tap.ring.worker.get("hook_errors") == 1
    untapped = Object()  # a server without settings for the tap is not even looked at
    assert wrap_sample_tokens(lambda self: "sampled", with_aux)(untapped) == "sampled"


@pytest.mark.parametrize("replace", [with_aux, planted])
def test_an_exception_of_vllm_itself_comes_through_once(tap, replace) -> None:
    calls = []

    def sample_tokens(self: Any) -> None:
        calls.append(self)
        raise ValueError("vLLM's own")

    runner = Sampler(planned(tap), ["a"])
    with pytest.raises(ValueError, match="vLLM's own"):
        wrap_sample_tokens(sample_tokens, replace)(runner)
    assert len(calls) == 1 and runner.use_aux_hidden_state_outputs is True
    assert tap.ring.worker.get("hook_errors") == (replace is planted)


def test_a_rank_that_keeps_failing_turns_its_tap_off(tap, caplog, monkeypatch) -> None:
    monkeypatch.setattr("specdec_tap.vllm_plugin.tap.logger.propagate", True)
    for _ in range(30):
        wrap_sample_tokens(Sampler.sample_tokens, planted)(Sampler(planned(tap), ["a"]))
    assert tap.active is False and tap.ring.worker.get("hook_errors") == 20
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 2


# -- the worker's methods -----------------------------------------------------------------------------------


class Worker:
    """As vLLM's ``Worker``; ``model_runner`` may be missing, as after a failed start."""

    def __init__(self, plan: Plan | None = None, **fields: Any) -> None:
        if plan is not None:
            self.model_runner = Object(**{PLAN: plan})
        self.calls: list[Any] = []
        self.__dict__.update(fields)

    def shutdown(self, *args: Any) -> str:
        self.calls.append(("shutdown", args))
        return "down"

    def finish_weight_update(self) -> str:
        self.calls.append("finished")
        return "updated"


def patched() -> type[Worker]:
    """A copy of the class, patched as ``gpu_worker`` and ``worker_base`` are."""
    copy: Any = type("Patched", (Worker,), dict(vars(Worker)))
    module: Any = types.ModuleType("worker")
    module.Worker = module.WorkerBase = copy
    rpc.patch_worker(module)
    rpc.patch_worker_base(module)
    return copy


@pytest.mark.parametrize("plan", [None, planned(None), planned(Object(close=planted))])
def test_a_worker_shuts_down_once(plan) -> None:
    worker = patched()(plan)
    assert worker.shutdown("now") == "down"
    assert worker.calls == [("shutdown", ("now",))]


def test_shutting_down_ends_the_capture(tap) -> None:
    worker = patched()(planned(tap))
    worker.shutdown()
    assert tap.active is False and worker.calls == [("shutdown", ())]


def test_what_fails_in_a_call_from_outside_is_an_answer(tap, monkeypatch, caplog) -> None:
    monkeypatch.setattr("specdec_tap.vllm_plugin.tap.logger.propagate", True)
    worker = patched()(planned(tap))
    assert worker.specdec_tap_control("pause")["paused"] is True
    assert "expected one of 'pause'" in worker.specdec_tap_control("stop")["error"]
    monkeypatch.setattr(tap, "_state", planted)
    message = "failed in this worker (RuntimeError: planted); serving continues"
    assert worker.specdec_tap_control("resume") == {"error": f"control 'resume' {message}"}
    assert worker.specdec_tap_status() == {"error": f"status {message}"}
    assert tap.ring.worker.get("hook_errors") == 2
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    monkeypatch.setattr(tap, "_note_failure", planted)
    assert worker.specdec_tap_status() == {"error": f"status {message}"}


def test_a_worker_without_capture_answers_nothing() -> None:
    for plan in (None, planned(None)):
        worker = patched()(plan)
        assert worker.specdec_tap_control("pause") is None
        assert worker.specdec_tap_status() is None


def test_an_offline_run_counts_past_a_worker_that_failed() -> None:
    statuses = [{"error": "planted"}, None, {"worker": {"dropped_hook_error": 2}, "writer": {"tokens": 5}}]
    assert left_out(Object(collective_rpc=lambda name: statuses)) == {"dropped_hook_error": 2}


# -- weights ------------------------------------------------------------------------------------------------


def answer(tap: Any, name: str) -> None:
    tap.on_schedule(schedule([new_request(name, [1, 2], max_tokens=1)]))
    tap.on_step(V1.step([name], [2], [0], [1, 2], [[3]]))
    tap.on_schedule(schedule(finished=[name]))


@pytest.mark.parametrize("how", ["reload_weights", "finish_weight_update"])
def test_replaced_weights_begin_a_stream_of_their_own(tap, tmp_path, how) -> None:
    worker = patched()(planned(tap))
    answer(tap, "old")
    tap.on_schedule(schedule([new_request("between", [1])]))
    tap.on_step(V1.step(["between"], [1], [0], [1], [[2]]))
    old = tap.channel.header.stream
    if how == "reload_weights":
        reload_weights = wrap_reload_weights(lambda self, **kwargs: "reloaded")
        assert reload_weights(worker.model_runner, weights_path="/models/next") == "reloaded"
    else:
        assert worker.finish_weight_update() == "updated"
        assert worker.calls == ["finished"]
    answer(tap, "new")
    new = tap.channel.header.stream
    tap.channel.finish()
    assert new != old and outcomes(tap)["dropped_weights_changed"] == 1
    with open_shards(tmp_path / "shards", streams=[old]) as store:
        assert [(r.meta.request_id, r.header.target.revision) for r in store] == [("old", None)]
    revision = "next+reload1" if how == "reload_weights" else "reload1"
    with open_shards(tmp_path / "shards", streams=[new]) as store:
        assert [(r.meta.request_id, r.header.target.revision) for r in store] == [("new", revision)]


def test_a_drafters_weights_are_not_the_targets(tap) -> None:
    stream = tap.channel.header.stream
    patched()(planned(tap), _weight_update_is_draft=True).finish_weight_update()
    assert tap.channel.header.stream == stream


def test_a_weight_update_that_vllm_refuses_is_its_own_error(tap) -> None:
    Refusing = patched()
    Refusing.finish_weight_update = rpc._wrap_finish(planted)
    stream = tap.channel.header.stream
    with pytest.raises(RuntimeError, match="planted"):
        Refusing(planned(tap)).finish_weight_update()
    assert tap.channel.header.stream == stream


@pytest.mark.parametrize("plan", [None, planned(None)])
def test_a_worker_without_capture_finishes_its_update(plan) -> None:
    assert patched()(plan).finish_weight_update() == "updated"


def test_a_stream_that_cannot_be_replaced_ends_capture_and_not_the_update(tap, monkeypatch) -> None:
    monkeypatch.setattr(tap.channel, "replace", planted)
    assert patched()(planned(tap)).finish_weight_update() == "updated"
    assert tap.active is False


# -- failures of what handles failures ----------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["_give_up", "_note_failure"])
def test_a_tap_that_fails_while_it_fails_goes_off_and_nothing_gets_out(tap, broken, monkeypatch) -> None:
    answer(tap, "before")
    tap.on_schedule(schedule([new_request("during", [1])]))
    monkeypatch.setattr(tap, broken, planted)
    tap.on_step(planted)
    assert tap.active is False
    answer(tap, "after")  # vLLM's calls go on
    tap.no_states()
    tap.channel.finish()
    got = outcomes(tap)
    assert (got["requests_started"], got["hook_errors"]) == (2, broken == "_give_up")


def test_an_announcement_whose_failure_cannot_be_noted_is_counted_all_the_same(tap, monkeypatch) -> None:
    monkeypatch.setattr(tap, "_note_failure", planted)
    tap.on_schedule(schedule([new_request("a", [1, "x"])]))
    assert tap.active is False
    tap.channel.finish()
    assert outcomes(tap)["dropped_hook_error"] == 1


def test_a_full_ring_that_cannot_be_given_up_is_a_failure_like_others(tap, monkeypatch) -> None:
    tap.on_schedule(schedule([new_request("a", [1])]))
    give_up = tap._give_up
    monkeypatch.setattr(tap.ring, "allocate", lambda size: None)
    monkeypatch.setattr(
        tap, "_give_up", lambda handles, why: planted() if "ring" in why else give_up(handles, why)
    )
    tap.on_step(V1.step(["a"], [1], [0], [1], [[2]]))
    tap.on_schedule(schedule(finished=["a"]))
    assert tap.active is True
    tap.channel.finish()
    got = outcomes(tap)
    assert (got["dropped_hook_error"], got["hook_errors"]) == (1, 1)
