"""Acceptance length of a drafter, from vLLM's own counters.

``acceptance length = 1 + accepted / drafts``: mean tokens per target forward, the bonus token included. Only
differences of counters are used, so a server that has run for days can be measured. Other traffic on it
during the measurement is counted too.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from . import replay as engine
from .errors import InputError
from .serving import Sample, read_metrics

COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "num_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SETTLE_S = 0.25
SETTLE_TRIES = 40


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """vLLM's speculative decoding counters, or the difference of two readings.

    Example:
        >>> DraftCounts(num_drafts=10, num_draft_tokens=30, num_accepted_tokens=5,
        ...             accepted_per_position=(4, 1, 0)).acceptance_length
        1.5
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @classmethod
    def from_metrics(cls, samples: Sequence[Sample]) -> DraftCounts | None:
        """Sum the counters over all engines; None if the server does no speculative decoding."""
        sums = dict.fromkeys(COUNTERS.values(), 0.0)
        positions: dict[int, float] = {}
        found = False
        for sample in samples:
            if sample.name in COUNTERS:
                found = True
                sums[COUNTERS[sample.name]] += sample.value
            elif sample.name == PER_POSITION:
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0.0) + sample.value
        if not found:
            return None
        per_position = tuple(int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1))
        return cls(**{name: int(value) for name, value in sums.items()}, accepted_per_position=per_position)

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        before = earlier.accepted_per_position + (0,) * len(self.accepted_per_position)
        return DraftCounts(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
            accepted_per_position=tuple(
                a - b for a, b in zip(self.accepted_per_position, before, strict=False)
            ),
        )

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per target forward, bonus token included; None before the first draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of draft tokens that were accepted, 0 to 1."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of drafts whose position k was accepted, one entry a position."""
        return tuple(n / self.num_drafts for n in self.accepted_per_position) if self.num_drafts else ()

    def to_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_per_position": list(self.acceptance_per_position),
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_position": list(self.accepted_per_position),
        }


@dataclass(kw_only=True)
class Measurement:
    """One server on one prompt set."""

    replay: engine.ReplayResult
    drafts: DraftCounts | None
    """None: the server does no speculative decoding."""
    categories: dict[str, DraftCounts] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    """Conversation id to the first answer."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.replay.output_tokens_per_s


def default_prompt_file() -> Path:
    """Return the project's own evaluation prompts: a jsonl with ``id``, ``category`` and ``turns``."""
    return Path(str(resources.files("specdec_tap") / "data" / "eval_prompts.jsonl"))


def load_prompts(path: Path, *, limit: int | None = None) -> list[engine.Conversation]:
    """Read an evaluation prompt file whole, at most ``limit`` conversations.

    Raises:
        InputError: A line is broken, or there is none.
    """
    engine.require_good_prompt_file(path, limit=limit)
    return list(engine.iterate_conversations(path, limit=limit))


def read_settled_counts(url: str) -> DraftCounts | None:
    """Read the counters when they have stopped moving.

    A request is answered before its last step is counted, so the first reading after a run may lack a few
    drafts. On a server with other traffic they never stop: then the reading after 10 seconds is used.
    """
    counts = DraftCounts.from_metrics(read_metrics(url))
    for _ in range(SETTLE_TRIES):
        if counts is None:
            return None
        time.sleep(SETTLE_S)
        again = DraftCounts.from_metrics(read_metrics(url))
        if again == counts:
            break
        counts = again
    return counts


def measure(
    conversations: Sequence[engine.Conversation],
    options: engine.ReplayOptions,
    *,
    on_progress: Callable[[engine.ReplayResult], None] | None = None,
) -> Measurement:
    """Send prompts to a running server and return what its counters say about them.

    Categories are sent one after the other, so that each has a counter difference of its own. A short warm-up
    request goes first and is not counted.

    Raises:
        InputError: The server cannot be reached, or any request failed: an acceptance length over an
            unknown part of the prompts is no measurement.
    """
    groups: dict[str, list[engine.Conversation]] = {}
    for conversation in conversations:
        groups.setdefault(conversation.category or "", []).append(conversation)
    warm_up = engine.Conversation(id="warm-up", turns=("Say hello.",))
    warmed = engine.replay(iter([warm_up]), dataclasses.replace(options, max_tokens=16))
    if warmed.failed:
        raise InputError(f"the server at {options.url} fails at its first request: {warmed.errors[0]}")

    result = engine.ReplayResult()
    answers: dict[str, str] = {}

    def keep(answer: engine.Answer) -> None:
        if answer.answers:
            answers[answer.id] = answer.answers[0]

    first = before = read_settled_counts(options.url)
    after = before
    categories: dict[str, DraftCounts] = {}
    for name, group in groups.items():
        engine.replay(iter(group), options, on_answer=keep, on_progress=on_progress, result=result)
        after = read_settled_counts(options.url)
        if before is not None and after is not None:
            categories[name] = after - before
        before = after
    if result.failed:
        raise InputError(
            f"{result.failed:,} of {result.conversations:,} evaluation requests failed at {options.url} "
            f"({result.errors[0] if result.errors else 'no reason given'}); nothing is measured"
        )
    drafts = None if first is None or after is None else after - first
    return Measurement(
        replay=result,
        drafts=drafts,
        categories=categories if list(categories) != [""] else {},
        answers=answers,
    )


@dataclass(frozen=True, kw_only=True)
class Load:
    """Generated tokens per second with so many requests under way, with and without the drafter."""

    concurrency: int
    output_tokens_per_s: float
    baseline_output_tokens_per_s: float | None = None

    @property
    def speedup(self) -> float | None:
        """None without a baseline."""
        base = self.baseline_output_tokens_per_s
        return self.output_tokens_per_s / base if base else None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"speedup": self.speedup}


def measure_loads(
    conversations: Sequence[engine.Conversation],
    options: engine.ReplayOptions,
    concurrencies: Sequence[int],
    *,
    on_progress: Callable[[engine.ReplayResult], None] | None = None,
) -> dict[int, float]:
    """Send all prompts once for each concurrency; returns generated tokens per second.

    Raises:
        InputError: A request failed.
    """
    out = {}
    for concurrency in concurrencies:
        here = dataclasses.replace(options, concurrency=concurrency)
        result = engine.replay(iter(conversations), here, on_progress=on_progress)
        if result.failed:
            raise InputError(
                f"{result.failed:,} of {result.conversations:,} requests failed at {options.url} with "
                f"{concurrency} under way ({result.errors[0] if result.errors else 'no reason given'})"
            )
        out[concurrency] = result.output_tokens_per_s
    return out


def join_loads(drafter: dict[int, float], baseline: dict[int, float]) -> list[Load]:
    """Put two servers' ``measure_loads`` side by side, by concurrency."""
    return [
        Load(
            concurrency=concurrency,
            output_tokens_per_s=rate,
            baseline_output_tokens_per_s=baseline.get(concurrency),
        )
        for concurrency, rate in sorted(drafter.items())
    ]


@dataclass(kw_only=True)
class Evaluation:
    """A drafter's measurement, and the same prompts without a drafter beside it."""

    drafter: Measurement
    baseline: Measurement | None = None
    loads: list[Load] = field(default_factory=list)
    """Speed at other concurrencies, ascending."""

    @property
    def identical_answers(self) -> tuple[int, int] | None:
        """``(equal, compared)`` greedy answers of the two servers; None without a baseline."""
        if self.baseline is None:
            return None
        common = self.drafter.answers.keys() & self.baseline.answers.keys()
        return sum(self.drafter.answers[i] == self.baseline.answers[i] for i in common), len(common)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as one JSON-able object."""
        drafts = self.drafter.drafts or DraftCounts()
        identical = self.identical_answers
        out = drafts.to_json() | {
            "requests": self.drafter.replay.requests,
            "too_long": self.drafter.replay.too_long,
            "output_tokens": self.drafter.replay.completion_tokens,
            "output_tokens_per_s": self.drafter.output_tokens_per_s,
            "categories": {name: counts.to_json() for name, counts in self.drafter.categories.items()},
            "baseline_output_tokens_per_s": None,
            "speedup": None,
            "identical_answers": None,
            "compared_answers": None,
            "loads": [load.to_json() for load in self.loads],
        }
        if self.baseline is not None and identical is not None:
            base = self.baseline.output_tokens_per_s
            out |= {
                "baseline_output_tokens_per_s": base,
                "speedup": self.drafter.output_tokens_per_s / base if base else None,
                "identical_answers": identical[0],
                "compared_answers": identical[1],
            }
        return out


def plot(evaluation: Evaluation, path: Path) -> None:
    """Draw acceptance by position, by category, and speed against concurrency into an image file.

    Panels that nothing was measured for are left out.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise InputError("--plot needs matplotlib; install it with 'pip install matplotlib'") from err
    panels = [_plot_positions]
    if evaluation.drafter.categories:
        panels.append(_plot_categories)
    if evaluation.loads:
        panels.append(_plot_loads)
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    for draw, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw(axes, evaluation)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as err:
        raise InputError(f"plot {str(path)!r} cannot be written ({err})") from err


_DARK, _LIGHT, _GREY = "#2a6f97", "#61a5c2", "#8d99ae"


def _plot_positions(axes: Any, evaluation: Evaluation) -> None:
    drafts = evaluation.drafter.drafts or DraftCounts()
    shares = drafts.acceptance_per_position
    bars = axes.bar(range(1, len(shares) + 1), shares, color=_DARK)
    axes.bar_label(bars, fmt="%.3f", padding=2)
    axes.set(xlabel="draft position", ylabel="share of drafts accepted", ylim=(0, 1))
    axes.set_xticks(range(1, len(shares) + 1))
    length = drafts.acceptance_length
    axes.set_title("no drafts" if length is None else f"acceptance length {length:.3f}")


def _plot_categories(axes: Any, evaluation: Evaluation) -> None:
    categories = evaluation.drafter.categories
    names = sorted(categories, key=lambda name: categories[name].acceptance_length or 0)
    lengths = [categories[name].acceptance_length or 1 for name in names]
    bars = axes.barh(
        [name or "(none)" for name in names], [value - 1 for value in lengths], left=1, color=_LIGHT
    )
    axes.bar_label(bars, labels=[f"{value:.2f}" for value in lengths], padding=2)
    # Room for the numbers, also where nothing was accepted.
    axes.set(xlabel="acceptance length", xlim=(1, 1 + max(0.1, max(lengths) - 1) * 1.15))
    axes.set_title("by prompt category")


def _plot_loads(axes: Any, evaluation: Evaluation) -> None:
    loads = evaluation.loads
    ticks = [load.concurrency for load in loads]
    if all(load.speedup is not None for load in loads):
        values = [load.speedup or 0.0 for load in loads]
        axes.axhline(1.0, color=_GREY, linewidth=1, linestyle="--")
        axes.set(ylabel="speed-up", title="speed-up by load")
        axes.set_ylim(0, max(1.0, *values) * 1.15)
    else:
        values = [load.output_tokens_per_s for load in loads]
        axes.set(ylabel="generated tokens/s", title="speed by load")
        axes.set_ylim(0, max(values) * 1.15)
    axes.plot(ticks, values, color=_DARK, marker="o")
    for load, value in zip(loads, values, strict=True):
        text = f"{value:.2f}x" if load.speedup is not None else f"{value:,.0f}"
        axes.annotate(text, (load.concurrency, value), (0, 6), textcoords="offset points", ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.set_xlabel("requests under way")
