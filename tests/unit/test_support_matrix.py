"""docs/support-matrix.md: every tick leads to a test that exists, and nothing is missing in its tables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from helpers.families import FAMILIES

pytest.importorskip("torch")

from specdec_trainer.algorithms import ALGORITHMS
from specdec_trainer.model import LAYERS

DOC = Path(__file__).parents[2] / "docs" / "support-matrix.md"
TEXT = DOC.read_text()
LINKS = dict(re.findall(r'^\[([a-z0-9-]+)\]: (\S+ "\w+")$', TEXT, re.MULTILINE))
NAMES = {
    "llama": "Llama 3.x", "mistral": "Mistral", "qwen2": "Qwen2.5", "qwen3": "Qwen3",
    "qwen3-moe": "Qwen3-MoE", "phi3": "Phi-3", "gpt-oss": "gpt-oss", "deepseek-v3": "DeepSeek-V3",
    "kimi-k2": "Kimi-K2",
    "kimi-k2.5": "Kimi-K2.5", "llama4": "Llama 4", "gemma3": "Gemma 3", "glm4-moe": "GLM-4-MoE",
}  # fmt: skip


def section(title: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    body = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def functions(path: Path) -> dict[str, str]:
    """Names of the tests in a file, and what stands before each (its decorators, the file's own marks)."""
    tree = ast.parse(path.read_text())
    marks = " ".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign))
    return {
        node.name: marks + " ".join(map(ast.unparse, node.decorator_list))
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("name", LINKS)
def test_a_link_leads_to_a_test(name: str) -> None:
    file, test = LINKS[name].split()
    path = (DOC.parent / file).resolve()
    assert path.is_file(), file
    assert test.strip('"') in functions(path), f"{file} has no {test}"


def test_every_link_is_defined_and_used() -> None:
    used = set(re.findall(r"\]\[([a-z0-9-]+)\]", TEXT))
    assert used == set(LINKS)


def test_every_tick_is_a_link() -> None:
    for line in TEXT.splitlines():
        if line.startswith("|"):
            for cell in line.strip("|").split("|"):
                assert not re.search(r"\byes\b(?!\]\[)", cell), line


def test_ticks_of_long_tests_say_so() -> None:
    """A cell whose test runs only with ``-m matrix`` is marked."""
    heads = [line for line in TEXT.splitlines() if line.startswith("|")]
    for name in ("v2", "guide", "smol"):
        file, test = LINKS[name].split()
        assert "matrix" in functions((DOC.parent / file).resolve())[test.strip('"')]
        for line in heads:
            if f"][{name}]" in line and name != "v2":  # its column's head says it
                assert f"][{name}] (*matrix*)" in line


def test_no_family_layer_or_algorithm_is_missing() -> None:
    targets = section("Targets")
    assert len(targets) == len(FAMILIES) == len(NAMES)
    for name, family in FAMILIES.items():
        (row,) = [r for r in targets if re.match(re.escape(NAMES[name]) + r"($| \(|,)", r[0])]
        if family.refused is None:
            assert row[1:4] == ["[yes][rows]", "[yes][v2]", "[yes][found]"] and "[yes][drafted]" in row[4]
        else:
            assert row[1] == "[refused by name][refused]" and row[4].startswith("no: ")
    assert {row[0].split("`")[1] for row in section("Drafter layers")} == set(LAYERS)
    assert {row[0].split("`")[1] for row in section("Algorithms")} == set(ALGORITHMS)
    layers = section("Algorithm, drafter layer and target, on vLLM")
    assert {row[0].split("`")[1] for row in layers} == set(ALGORITHMS)
    assert all(len(row) == 1 + len(LAYERS) for row in layers)


def test_engines_that_were_never_run_are_said_to_be_so() -> None:
    engines = {row[0]: row[3] for row in section("Engines")}
    assert engines.pop("vLLM 0.32").startswith("[yes][")
    assert engines == {"SGLang": "never", "TensorRT-LLM": "never"}
