"""Training algorithms, each one file with one class; what is listed here, the whole trainer knows."""

from __future__ import annotations

from ..drafter import Drafter
from ..model import Eagle3Drafter
from .eagle1 import Eagle1Drafter
from .medusa import MedusaDrafter
from .peagle import ParallelEagleDrafter

ALGORITHMS: dict[str, type[Drafter]] = {
    "eagle3": Eagle3Drafter,
    "eagle1": Eagle1Drafter,
    "medusa": MedusaDrafter,
    "peagle": ParallelEagleDrafter,
}
