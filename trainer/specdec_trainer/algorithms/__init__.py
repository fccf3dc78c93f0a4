"""Training algorithms, each one file with one class; what is listed here, the whole project knows."""

from __future__ import annotations

from typing import Any

from ..drafter import Drafter
from ..model import Eagle3Drafter
from .eagle1 import Eagle1Drafter
from .medusa import MedusaDrafter
from .peagle import ParallelEagleDrafter

ALGORITHMS: dict[str, type[Drafter]] = {
    "eagle3": Eagle3Drafter,
    "peagle": ParallelEagleDrafter,
    "eagle1": Eagle1Drafter,
    "medusa": MedusaDrafter,
}


def algorithm_of(config: dict[str, Any]) -> str | None:
    """Algorithm of a drafter's ``config.json``; None where no algorithm knows it."""
    # What extends EAGLE-3 has its layout and more, so others are asked first and EAGLE-3 last.
    names = sorted(
        ALGORITHMS,
        key=lambda name: (issubclass(ALGORITHMS[name], Eagle3Drafter), ALGORITHMS[name] is Eagle3Drafter),
    )
    return next((name for name in names if ALGORITHMS[name].recognises(config)), None)
