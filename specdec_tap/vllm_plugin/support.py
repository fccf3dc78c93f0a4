"""Which vLLM versions the tap knows. Imports nothing, so that ``specdec-tap doctor`` can ask too."""

from __future__ import annotations

import re

OLDEST_VLLM = (0, 30)
NEWEST_TESTED_VLLM = (0, 32)


def supported_range() -> str:
    """Return the tested range in words, for messages."""
    return f"{'.'.join(map(str, OLDEST_VLLM))} to {'.'.join(map(str, NEWEST_TESTED_VLLM))}"


def version_number(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    Example:
        >>> version_number("0.32.0+cpu")
        (0, 32)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def version_problem(version: str) -> str | None:
    """Return why a vLLM version is too old to be tapped, or None. Newer ones than tested are tried."""
    if version_number(version) < OLDEST_VLLM:
        return f"vllm {version} is not supported ({supported_range()} are); install a supported version"
    return None


def version_warning(version: str) -> str | None:
    """Return a warning about a vLLM version newer than the newest tested, or None."""
    if version_number(version) > NEWEST_TESTED_VLLM:
        return f"vllm {version} is newer than the newest tested ({supported_range()})"
    return None
