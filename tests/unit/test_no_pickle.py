"""No shipped module can execute what a file holds: torch.load of tensors only, no pickle, eval or exec."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("specdec_tap", "trainer/specdec_trainer", "server/specdec_server")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
ALLOWED = {"trainer/specdec_trainer/export.py": {"pickle.UnpicklingError"}}
"""What torch.load raises for a foreign file has no other name."""


def findings(source: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Lines of a module that could execute a file's content."""
    found = []
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names if a.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(f"{node.lineno}: from {node.module} import ...")
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES
        ):
            use = ast.unparse(node)
            found += [] if use in allowed else [f"{node.lineno}: {use}"]
        elif isinstance(node, ast.Call):
            call, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            unsafe = (
                call in ("eval", "exec", "compile", "__import__")
                or (call == "torch.load" and keywords.get("weights_only") != "True")
                or keywords.get("allow_pickle") == "True"
                or call in ("yaml.load", "yaml.unsafe_load")
            )
            found += [f"{node.lineno}: {call}"] if unsafe else []
    allowed_modules = {use.split(".")[0] for use in allowed}
    return found + [f"import {name}" for name in sorted(names - allowed_modules)]


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_shipped_can_execute_a_file(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 10
    found = {}
    for path in files:
        name = str(path.relative_to(ROOT))
        if lines := findings(path.read_text(), frozenset(ALLOWED.get(name, ()))):
            found[name] = lines
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)", "torch.load(f, weights_only=False)", "torch.load(f, weights_only=flag)", "eval(x)",
        "exec(x)", "import pickle", "from pickle import loads", "np.load(f, allow_pickle=True)",
        "import pickle\npickle.loads(x)",
    ],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert findings(source)
    assert not findings("torch.load(f, weights_only=True)\nmodel.eval()\nre.compile(x)")
