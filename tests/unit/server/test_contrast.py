"""Colours of the page: WCAG AA contrast in both schemes, computed from the style sheet itself."""

import re
from pathlib import Path

import pytest
import specdec_server

CSS = (Path(specdec_server.__file__).parent / "static" / "app.css").read_text()


def variables(pattern: str) -> dict[str, str]:
    block = re.search(pattern + r"\s*\{(.*?)\}", CSS, re.DOTALL | re.MULTILINE)[1]
    return dict(re.findall(r"(--[a-z0-9-]+):\s*([^;]+);", block))


LIGHT = variables(r"^:root")
DARK = variables(r':root\[data-theme="dark"\]')
SYSTEM_DARK = variables(r':root:not\(\[data-theme="light"\]\)')


def rgb(value: str) -> tuple[float, ...]:
    if value.startswith("#"):
        return tuple(int(value[i : i + 2], 16) for i in (1, 3, 5))
    return tuple(float(v) for v in value.split())


def mix(over: str, under: str, share: float) -> tuple[float, ...]:
    return tuple(o * share + u * (1 - share) for o, u in zip(rgb(over), rgb(under), strict=True))


def luminance(color: tuple[float, ...]) -> float:
    parts = [v / 255 for v in color]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


TEXT = [
    *((front, back) for front in ("--text", "--muted", "--accent") for back in ("--bg", "--panel", "--sunk")),
    *((f"--{name}", f"--{name}-soft") for name in ("good", "warn", "bad", "live", "earlier")),
    *((f"--{name}", "--panel") for name in ("good", "warn", "bad")),
    ("--muted", "--sunk"),
    ("--on-accent", "--accent"),
]


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("front", "back"), TEXT)
def test_text_is_readable(scheme, front, back):
    assert contrast(rgb(scheme[front]), rgb(scheme[back])) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_on_tinted_tokens_is_readable(scheme):
    shares = [float(s) for s in re.findall(r"background: rgb\(var\(--wrong\) / ([0-9.]+)\)", CSS)]
    assert shares
    for share in shares:
        assert contrast(rgb(scheme["--text"]), mix(scheme["--wrong"], scheme["--panel"], share)) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    "name", [*(f"--series-{i}" for i in range(6)), "--right", "--wrong", "--line-strong"]
)
def test_lines_and_controls_stand_out(scheme, name):
    assert contrast(rgb(scheme[name]), rgb(scheme["--panel"])) >= 3


def test_both_dark_schemes_are_the_same():
    assert SYSTEM_DARK == DARK
    assert set(DARK) | {"--mono"} == set(LIGHT)
