"""Two processes (gloo) train what one process trains with twice the batch, and never wait for each other
in vain."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from specdec_trainer import checkpoint
from specdec_trainer.config import TrainConfig
from specdec_trainer.distributed import Group
from specdec_trainer.run import run
from trainer_fakes import learnable_store, tiny_target

SETTINGS = {"batch_tokens": 60, "ttt_steps": 2, "eval_draft_tokens": 2, "dtype": "float32", "max_steps": 4}

WORKER = """
import os, signal, sys, threading, time
sys.path[:0] = {paths!r}
from pathlib import Path
from trainer_fakes import learnable_store
from specdec_trainer.config import TrainConfig
from specdec_trainer.run import run
store = learnable_store({target!r})
if os.environ["RANK"] == {broken_rank!r}:
    for record in store:
        record._aux[:] = float("nan")
if os.environ["RANK"] == {stopped_rank!r}:
    def stop():
        log = Path({out!r}) / "log.jsonl"
        while not (log.is_file() and '"train"' in log.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=stop, daemon=True).start()
result = run(TrainConfig(**{settings!r}), Path("shards"), out=Path({out!r}), target_path=Path({target!r}),
             store=store, tensorboard=False)
sys.exit(3 if result.interrupted else 0)
"""


def two_processes(
    tmp_path: Path, target: Path, out: Path, settings: dict, *, broken_rank: str = "", stopped_rank: str = ""
) -> list[int]:
    """Exit codes of two ranks; whichever is still alive 20 s after the first failure is killed, as
    torchrun does."""
    code = WORKER.format(
        paths=[str(Path(__file__).parent)], target=str(target), out=str(out), settings=settings,
        broken_rank=broken_rank, stopped_rank=stopped_rank,
    )  # fmt: skip
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    deadline = time.monotonic() + 90
    try:
        while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
            if any(p.poll() not in (None, 0, 3) for p in ranks):
                break
            time.sleep(0.1)
    finally:
        for p in ranks:
            p.kill() if p.poll() is None else None
            p.wait(10)
    return [p.returncode for p in ranks]


def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "m")
    assert two_processes(tmp_path, target, tmp_path / "two", SETTINGS) == [0, 0]
    run(
        TrainConfig(**SETTINGS, accumulate=2), Path("shards"), out=tmp_path / "one", target_path=target,
        store=learnable_store(target), tensorboard=False,
    )  # fmt: skip
    one, two = (
        checkpoint.read(checkpoint.newest(tmp_path / n / "checkpoints")[0])[0] for n in ("one", "two")
    )
    for name, tensor in one.items():
        if name.startswith("model."):
            # Newton-Schulz in bfloat16 turns the last bit of a sum into more.
            torch.testing.assert_close(two[name], tensor, rtol=2e-2, atol=2e-3, msg=name)


def test_a_wish_to_stop_is_shared(tmp_path: Path) -> None:
    """B79: one process is interrupted, both end at the same step with a checkpoint."""
    target = tiny_target(tmp_path / "m")
    settings = {**SETTINGS, "max_steps": None, "epochs": 5000, "eval_epochs": 5000, "log_steps": 1}
    assert two_processes(tmp_path, target, tmp_path / "run", settings, stopped_rank="1") == [3, 3]
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")


def test_one_process_without_readable_data_ends_all(tmp_path: Path) -> None:
    """B79: rank 1 fails alone; nobody hangs and nobody reports success."""
    target = tiny_target(tmp_path / "m")
    started = time.monotonic()
    codes = two_processes(tmp_path, target, tmp_path / "run", SETTINGS, broken_rank="1")
    assert 0 not in codes
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(("count", "size"), [(7, 2), (2, 3), (1, 4), (12, 4)])
def test_everyone_gets_the_same_number_of_batches(count: int, size: int) -> None:
    """B79: uneven data cannot make one process take another step than its peers."""
    shares = [Group(r, size).share(list(range(count))) for r in range(size)]
    assert len({len(s) for s in shares}) == 1
    assert len(shares[0]) >= 1
    if count >= size:
        flat = [b for s in shares for b in s]
        assert len(flat) == len(set(flat))
