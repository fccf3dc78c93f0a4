"""The commands of a guide: every line of its fenced ``bash`` blocks, so that tests can run all of them."""

from __future__ import annotations

import re
from pathlib import Path

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(guide: str) -> list[str]:
    """Commands of ``docs/guides/<guide>``, in order; a trailing backslash joins lines."""
    text = (GUIDES / guide).read_text()
    assert text.count("```") == 2 * len(_BLOCK.findall(text)), (
        "a fenced block of a guide is bash, or is wrong"
    )
    lines = "\n".join(_BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
