"""The frame of the command line, and that every command shown to a user exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_tap.cli import COMMANDS, EXTRAS, build_parser, main
from specdec_tap.errors import InputError

REPO = Path(__file__).parents[3]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def commands_in(text: str) -> list[str]:
    """Return the lines of a text that run specdec-tap, without prompts, variables, comments and brackets."""
    found = []
    for line in text.splitlines():
        line = re.sub(r"\s#\s.*$", "", line.strip().removeprefix("$ ")).strip()
        line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
        if re.match(r"specdec-tap [a-z-]", line):
            found.append(line)
    return found


def parse(line: str) -> None:
    argv = shlex.split(line)[1:]
    build_parser(next((a for a in argv if a in COMMANDS), None)).parse_args(argv)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_examples_that_parse(name, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    examples = commands_in(shown.partition("examples:")[2])
    assert len(examples) >= 2
    for example in examples:
        if not example.endswith("--help"):
            parse(example)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_the_documentation_parses(page):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for block in (text for language, text in blocks if language in {"bash", "sh", "console"}):
        for line in commands_in(block.replace("\\\n", " ")):
            if "..." not in line and "COMMAND" not in line:
                parse(line)


def test_the_readme_lists_every_command():
    text = (REPO / "README.md").read_text()
    missing = [name for name in COMMANDS if f"`specdec-tap {name}" not in text]
    assert not missing


def test_the_files_that_the_readme_names_exist():
    links = re.findall(r"\]\(([^)#]+)\)", (REPO / "README.md").read_text())
    assert links
    assert not [link for link in links if "://" not in link and not (REPO / link).exists()]


def test_no_command_is_wrong_usage(capsys):
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_the_overview_loads_no_command():
    code = "import sys; from specdec_tap.cli import main\ntry:\n main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in sys.modules if m.startswith('specdec_tap.cli.')], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] False"


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys, tmp_path):
    """A traceback ending in ModuleNotFoundError tells a user nothing about extras."""
    from specdec_tap.cli import replay

    def run(args) -> int:
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    monkeypatch.setattr(replay, "run", run)
    assert main(["replay", "x"]) == 2
    assert "torch.nn is not installed; install it with 'pip install \"specdec-tap[train]\"'" in (
        capsys.readouterr().err
    )


def test_every_extra_is_one_of_the_package():
    import tomllib

    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])


def test_the_dashboard_listens_on_this_machine_only_unless_it_is_told_otherwise(monkeypatch, tmp_path):
    assert build_parser("dashboard").parse_args(["dashboard", "shards"]).host == "127.0.0.1"
    from specdec_tap.cli import dashboard

    asked = []

    def listen(host: str, port: int) -> None:
        asked.append(host)
        raise InputError("far enough")

    monkeypatch.setattr(dashboard, "listen", listen)
    monkeypatch.delenv(dashboard.TOKEN_VARIABLE, raising=False)
    assert main(["dashboard", str(tmp_path)]) == 2
    assert asked == ["127.0.0.1"]
