"""Files of vLLM's ExampleHiddenStatesConnector: ``REQUEST.safetensors``, states and token ids of one request.

They hold what speculators' files hold, without a dataset beside them, so nothing says which tokens to train
on.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .common import Sample
from .speculators import read, write_states

__all__ = ["read", "write"]


def write(samples: Iterable[Sample], out: Path, final_hidden: str) -> None:
    """One file a sequence. Names are numbers: a request's own id was chosen by a client."""
    assert final_hidden == "pre_norm", "the connector keeps states before the norm"
    for number, sample in enumerate(samples):
        write_states(out / f"request-{number}.safetensors", sample)
