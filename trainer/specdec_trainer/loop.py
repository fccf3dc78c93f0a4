"""The training loop. Everything it uses is built before and passed in; it knows neither models nor file
formats."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec_tap.errors import SpecdecTapError

from .batch import Batch
from .checkpoint import LoopState
from .config import TrainConfig
from .distributed import Group, sum_after_backward
from .evaluate import Evaluation
from .objective import Objective, Sums
from .optim import Optimizers, WeightAverage, clip_gradients, lr_factor

_ENDLESS_EVAL_STEPS = 100
_ENDLESS_WARMUP_STEPS = 50


class DivergedError(SpecdecTapError):
    """Loss or gradient is not finite; the message names the records."""


class StopRequested(Exception):
    """The user asked to stop; state has been saved."""


@dataclass(slots=True)
class Window:
    """Sums since the last log line."""

    loss: torch.Tensor
    correct: torch.Tensor
    count: torch.Tensor
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0

    @classmethod
    def of(cls, steps: int) -> Window:
        return cls(*(torch.zeros(steps, dtype=torch.float64) for _ in range(3)))

    def add(self, sums: Sums, tokens: int, waited: float) -> None:
        self.loss += sums.loss.double().cpu()
        self.correct += sums.correct.double().cpu()
        self.count += sums.count.double().cpu()
        self.tokens += tokens
        self.waited += waited


@dataclass(slots=True)
class Hooks:
    """What the loop calls out to."""

    epoch_batches: Callable[[int, int, threading.Event], tuple[int | None, Iterator[Batch]]]
    """``(epoch, first batch, wish to stop) -> (batches in this pass for this process, batches from the first
    on)``; None for a pass that has no end of its own, which a wish to stop must end."""
    evaluate: Callable[[], Evaluation | None]
    log: Callable[[str, dict[str, Any]], None]
    save: Callable[[LoopState], None]
    saved_best: Callable[[LoopState, Evaluation], None]
    progress: Callable[[float, str], None]
    newest_is_best: bool = False
    """Keep every evaluated state instead of the best one: the held-out records change as well."""


def train(
    config: TrainConfig,
    objective: Objective,
    optimizers: Optimizers,
    average: WeightAverage | None,
    generator: torch.Generator,
    state: LoopState,
    hooks: Hooks,
    group: Group,
) -> LoopState:
    """Run until the schedule ends; returns the final state.

    Raises:
        DivergedError: Loss or gradient is not finite. Weights are those of the last good step.
        StopRequested: Ctrl-C or SIGTERM; a checkpoint was written.
    """
    objective.model.train()
    window = Window.of(objective.steps)
    session_start, elapsed_before = time.perf_counter(), state.elapsed
    last_save = state.elapsed
    with _stop_signal() as stop:
        while not finished(config, state):
            per_epoch, batches = hooks.epoch_batches(state.epoch, state.batch, stop)
            eval_every = steps_between_evaluations(config, per_epoch)
            waiting = time.perf_counter()
            for group_of_batches in _in_groups(batches, config.accumulate):
                waited = time.perf_counter() - waiting
                progress = run_progress(config, state, per_epoch)
                shared = [stop.is_set(), elapsed_before + time.perf_counter() - session_start]
                tokens, asked_to_stop, seconds = train_step(
                    config, objective, optimizers, group_of_batches, generator, progress, window,
                    waited, state, group, shared,
                )  # fmt: skip
                if group.size == 1:
                    asked_to_stop = stop.is_set()  # also when it came during the step
                if average is not None:
                    average.update()
                state.step += 1
                state.batch += len(group_of_batches)
                state.tokens += tokens
                # Every process must end at the same step, so they share one clock and one wish to stop.
                state.elapsed = seconds / group.size
                hooks.progress(
                    run_progress(config, state, per_epoch), f"loss {_first(window.loss, window.count):.3f}"
                )

                # Every log_steps steps, first process: one line of sums since the last one.
                if state.step % config.log_steps == 0:
                    _log(hooks, state, window, per_epoch, progress)
                    window = Window.of(objective.steps)

                # Every eval_epochs passes: held-out numbers, best checkpoint, early stop.
                if state.step % eval_every == 0 and not finished(config, state):
                    _evaluate(hooks, state, group)

                # Every save_interval seconds, on Ctrl-C, or at the end of a bounded run: a checkpoint.
                # Seconds are those that all processes share: saving sharded weights takes all of them.
                if asked_to_stop or state.elapsed - last_save > config.save_interval:
                    hooks.save(state)
                    last_save = state.elapsed
                if asked_to_stop:
                    raise StopRequested
                if finished(config, state):
                    break
                waiting = time.perf_counter()
            if per_epoch is None:
                if stop.is_set() and not finished(config, state):
                    hooks.save(state)
                    raise StopRequested
                break
            if state.batch >= per_epoch:
                state.epoch, state.batch = state.epoch + 1, 0
    if window.count[0]:
        _log(hooks, state, window, 1, 1.0)
    if state.evaluated_step != state.step:
        _evaluate(hooks, state, group)
    hooks.save(state)
    return state


def train_step(
    config: TrainConfig, objective: Objective, optimizers: Optimizers, batches: list[Batch],
    generator: torch.Generator, progress: float, window: Window, waited: float, state: LoopState,
    group: Group, shared: list[float],
) -> tuple[int, bool, float]:  # fmt: skip
    """One optimizer step over some batches; gradients are sums, divided once by the total weight.

    Args:
        shared: Whether this process was asked to stop, and its seconds of training so far.

    Returns:
        ``(rows of all processes, whether any was asked to stop, their seconds added up)``.
    """
    device = next(objective.model.parameters()).device
    weight = torch.zeros((), dtype=torch.float64)
    rows = 0
    bad = None
    for i, batch in enumerate(batches):
        sum_after_backward(objective.model, i == len(batches) - 1)
        batch = batch.to(device)
        sums = objective.loss(batch, generator)
        if not bool(torch.isfinite(sums.total)):
            bad = batch
        sums.total.backward()
        weight += batch.weight.double().sum().cpu()
        rows += batch.num_rows
        window.add(sums, batch.num_rows, waited)
        waited = 0.0
    total, rows_everywhere, broken, stop, seconds = group.sum_gradients(
        optimizers.parameters, [float(weight), rows, bad is not None, *shared]
    )
    for p in optimizers.parameters:
        if p.grad is not None:
            p.grad.div_(total)
    norm = clip_gradients(optimizers.parameters, config.clip)
    if broken or not math.isfinite(float(norm)):
        optimizers.zero_grad()
        guilty = [bad] if bad is not None else batches
        names = [name for b in guilty for name in b.record_ids]
        what = "loss" if broken else "gradient"
        raise DivergedError(
            f"the {what} is not finite at step {state.step + 1:,}; stopped before the update. Records "
            "of this step: "
            + ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            + ". Check them with 'specdec-tap shards verify', or lower --lr"
        )  # fmt: skip
    factor = lr_factor(progress, warmup=config.warmup, shape=config.schedule, floor=config.lr_floor)
    optimizers.step(factor)
    optimizers.zero_grad()
    return int(rows_everywhere), bool(stop), seconds


def steps_between_evaluations(config: TrainConfig, per_epoch: int | None) -> int:
    """Optimizer steps from one evaluation to the next."""
    if config.eval_steps is not None:
        return config.eval_steps
    if per_epoch is None:
        return _ENDLESS_EVAL_STEPS
    return max(1, round(config.eval_epochs * per_epoch / config.accumulate))


def run_progress(config: TrainConfig, state: LoopState, per_epoch: int | None) -> float:
    """Share of the run that is done, 0 to 1: the furthest of passes, steps and seconds.

    A run without any end only warms up, over its first steps.
    """
    if per_epoch is not None:
        done = (state.epoch + state.batch / max(1, per_epoch)) / config.epochs
    elif config.max_steps is None and config.time_limit is None:
        done = config.warmup * min(1.0, (state.step + 1) / _ENDLESS_WARMUP_STEPS)
    else:
        done = 0.0
    if config.max_steps is not None:
        done = max(done, state.step / config.max_steps)
    if config.time_limit is not None:
        done = max(done, state.elapsed / config.time_limit)
    return min(1.0, done)


def finished(config: TrainConfig, state: LoopState) -> bool:
    """Nothing is left to do."""
    return (
        state.epoch >= config.epochs
        or (config.max_steps is not None and state.step >= config.max_steps)
        or (config.time_limit is not None and state.elapsed >= config.time_limit)
        or bool(config.patience and state.stale >= config.patience)
    )


def _evaluate(hooks: Hooks, state: LoopState, group: Group) -> None:
    result = hooks.evaluate()
    state.evaluated_step = state.step
    if result is None:
        return
    hooks.log("eval", {"step": state.step, "epoch": state.epoch, "tokens": state.tokens, **result.as_dict()})
    better = hooks.newest_is_best or result.simulated_acceptance_length > state.best
    # The first process decides: on GPUs the last digits of others may differ, and writing takes all of them.
    if group.any(group.first and better):
        state.best, state.best_step, state.stale = result.simulated_acceptance_length, state.step, 0
        hooks.saved_best(state, result)
    else:
        state.stale += 1


def _log(hooks: Hooks, state: LoopState, window: Window, per_epoch: int | None, progress: float) -> None:
    seconds = max(1e-9, time.perf_counter() - window.started)
    count = window.count.tolist()
    hooks.log("train", {
        "step": state.step,
        "epoch": round(state.epoch + (state.batch / max(1, per_epoch) if per_epoch else 0.0), 4),
        "progress": round(progress, 6),
        "loss": [v / n if n else None for v, n in zip(window.loss.tolist(), count, strict=True)],
        "accuracy": [v / n if n else None for v, n in zip(window.correct.tolist(), count, strict=True)],
        "rows": [int(n) for n in count],
        "tokens": state.tokens,
        "tokens_per_s": window.tokens / seconds,
        "data_wait": window.waited / seconds,
    })  # fmt: skip


def _first(total: torch.Tensor, count: torch.Tensor) -> float:
    return float(total[0] / count[0].clamp(min=1))


def _in_groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second Ctrl-C interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def ask(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
