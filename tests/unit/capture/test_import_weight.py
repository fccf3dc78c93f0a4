"""What must be light to import is light: checked in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "transformers", "matplotlib")


def imported(statement: str, modules: tuple[str, ...] = HEAVY) -> list[str]:
    code = f"import sys\n{statement}\nprint(*[m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import specdec_tap; specdec_tap.open_shards",
        "import specdec_tap.config, specdec_tap.errors",
        "import specdec_tap.shards.reader, specdec_tap.shards.writer, specdec_tap.shards.codec",
        "import specdec_tap.capture.assembler, specdec_tap.capture.ring, specdec_tap.capture.writer_process",
        "import specdec_tap.cli",
        "import specdec_server.app, specdec_server.control",
        "import specdec_tap.cli.dashboard",
        "from specdec_tap.vllm_plugin import register; register(); register()",
    ],
)
def test_no_heavy_library_is_imported(statement):
    assert imported(statement) == []


def test_registering_with_capture_on_imports_nothing_heavy_either(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_TAP_DIR", str(tmp_path))
    assert imported("from specdec_tap.vllm_plugin import register; register(); register()") == []


def test_registering_while_switched_off_does_not_even_read_the_settings(monkeypatch):
    monkeypatch.setenv("SPECDEC_TAP", "off")
    monkeypatch.setenv("SPECDEC_TAP_NONSENSE", "1")
    modules = (*HEAVY, "numpy", "specdec_tap.vllm_plugin.hooks")
    assert imported("from specdec_tap.vllm_plugin import register; register()", modules) == []
