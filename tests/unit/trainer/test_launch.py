"""``specdec-tap train --nproc``: the same command again in several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shard_feed import append_records
from specdec_trainer import checkpoint
from specdec_trainer.export import check_drafter
from trainer_fakes import tiny_target

from specdec_tap.cli import build_parser, main


def test_every_argument_reaches_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder or a value that is called like the sub-command is no sub-command."""
    started: list[list[str]] = []

    def remember(command: list[str], **_) -> subprocess.CompletedProcess:
        started.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(subprocess, "run", remember)
    argv = ["--traceback", "train", "train", "--nproc", "2", "--target-name", "train", "--epochs=3"]
    assert main(argv) == 0
    (command,) = started
    assert "--nproc-per-node=2" in command
    passed = command[command.index("specdec_tap") + 1 :]
    assert passed == argv
    args = build_parser("train").parse_args(passed)
    assert (args.shards, args.target_name, args.set_epochs) == ("train", "train", "3")


def test_two_processes_train_to_the_end(tmp_path: Path) -> None:
    """The shards lie in a folder named ``train``; both gloo processes find them, one writes the run."""
    target = tiny_target(tmp_path / "model")
    append_records(tmp_path / "train", target, first=0, count=24, pause_s=0.0)
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    done = subprocess.run(
        [
            sys.executable, "-m", "specdec_tap", "train", "train", "--nproc", "2", "--target", str(target),
            "--out", "run", "--json", "numbers.json", "--device", "cpu", "--dtype", "float32", "--ttt-steps",
            "2", "--batch-tokens", "60", "--max-steps", "4", "--held-out", "0.2", "--eval-draft-tokens", "2",
        ],
        cwd=tmp_path, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder: run") == 1
    assert json.loads((tmp_path / "numbers.json").read_text())["steps"] == 4
    _, meta = checkpoint.read(checkpoint.newest(tmp_path / "run" / "checkpoints")[0])
    assert (meta["state"]["step"], meta["state"]["processes"]) == (4, 2)
    assert check_drafter(tmp_path / "run" / "drafter") == []
