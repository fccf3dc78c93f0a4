"""Two processes (gloo) train what one process trains with twice the batch, and never wait for each other
in vain."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from specdec_trainer import checkpoint, loop
from specdec_trainer.checkpoint import LoopState
from specdec_trainer.config import TrainConfig
from specdec_trainer.distributed import Group
from specdec_trainer.evaluate import Evaluation
from specdec_trainer.export import check_drafter
from specdec_trainer.loop import Hooks
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
             store=store, tensorboard=False, resume={resume})
sys.exit(3 if result.interrupted else 0)
"""


def two_processes(
    tmp_path: Path,
    target: Path,
    out: Path,
    settings: dict,
    *,
    broken_rank: str = "",
    stopped_rank: str = "",
    resume: bool = False,
) -> list[int]:
    """Exit codes of two ranks; whichever is still alive 20 s after the first failure is killed, as
    torchrun does."""
    code = WORKER.format(
        paths=[str(Path(__file__).parent)], target=str(target), out=str(out), settings=settings,
        broken_rank=broken_rank, stopped_rank=stopped_rank, resume=resume,
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


def alone(target: Path, out: Path, *, resume: bool = False, **settings) -> LoopState:
    return run(
        TrainConfig(**settings), Path("shards"), out=out, target_path=target, store=learnable_store(target),
        tensorboard=False, resume=resume,
    ).state  # fmt: skip


def newest(out: Path) -> tuple[dict[str, torch.Tensor], dict]:
    return checkpoint.read(checkpoint.newest(out / "checkpoints")[0])


def assert_same_weights(out: Path, expected: Path) -> None:
    got, want = newest(out)[0], newest(expected)[0]
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if name.startswith(("model.", "average.")):
            # Newton-Schulz in bfloat16 turns the last bit of a sum into more.
            torch.testing.assert_close(got[name], tensor, rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path, sharding: str, optimizer: str) -> None:
    """Accumulated over two batches each: gradients and counts are summed once a step."""
    target = tiny_target(tmp_path / "m")
    settings = {**SETTINGS, "max_steps": 3, "batch_tokens": 30, "optimizer": optimizer, "ema": 0.5,
                "broken_keep": 1.0}  # fmt: skip
    both = {**settings, "sharding": sharding, "accumulate": 2}
    assert two_processes(tmp_path, target, tmp_path / "two", both) == [0, 0]
    alone(target, tmp_path / "one", **settings, accumulate=4)
    assert_same_weights(tmp_path / "two", tmp_path / "one")
    assert check_drafter(tmp_path / "two" / "drafter") == []


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, sharding: str) -> None:
    """Two processes, then one, then two again; weights and moments come through whole."""
    target, out = tiny_target(tmp_path / "m"), tmp_path / "run"
    settings = {**SETTINGS, "schedule": "constant", "sharding": sharding, "held_out": 0.2}
    assert two_processes(tmp_path, target, out, settings | {"max_steps": 2}) == [0, 0]
    before = newest(out)[0]
    # No step: what is saved again is what was loaded.
    shutil.copytree(out, tmp_path / "copy")
    state = alone(target, tmp_path / "copy", **settings | {"max_steps": 2}, resume=True)
    assert (state.step, state.processes) == (2, 1)
    after = newest(tmp_path / "copy")[0]
    for name, tensor in before.items():
        if "generator" not in name:
            assert torch.equal(after[name], tensor), name
    state = alone(target, out, **settings | {"max_steps": 4}, resume=True)
    assert state.step == 4
    assert two_processes(tmp_path, target, out, settings | {"max_steps": 6}, resume=True) == [0, 0]
    tensors, meta = newest(out)
    assert meta["state"]["step"] == 6
    assert meta["state"]["processes"] == 2
    assert all(bool(torch.isfinite(t.float()).all()) for n, t in tensors.items() if n.startswith("model."))


def test_the_place_in_a_pass_is_kept_with_another_number_of_processes() -> None:
    state = LoopState(batch=5, processes=2)
    assert checkpoint.regroup(state, 4)
    assert (state.batch, state.processes) == (3, 4)  # 10 batches are done: 3 each, two are left out
    assert not checkpoint.regroup(state, 4)


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


@pytest.mark.parametrize(("first_says", "own_length"), [(True, 1.0), (False, 9.0)])
def test_the_first_process_decides_what_is_best(first_says: bool, own_length: float) -> None:
    """Writing sharded weights takes every process: last digits that differ must not leave one waiting."""

    class Second(Group):
        def any(self, flag: bool) -> bool:
            assert not flag, "only the first process votes"
            return first_says

    evaluation = Evaluation((1.0,), (1,), (1,), 1, (int(own_length) - 1,), 1)
    written: list[int] = []
    hooks = Hooks(
        epoch_batches=lambda *_: (0, iter(())), evaluate=lambda: evaluation, log=lambda *_: None,
        save=lambda _: None, saved_best=lambda state, _: written.append(state.step),
        progress=lambda *_: None,
    )  # fmt: skip
    state = LoopState(step=7, best=5.0)
    loop._evaluate(hooks, state, Second(rank=1, size=2))
    assert written == ([7] if first_says else [])
    assert state.stale == (0 if first_says else 1)


@pytest.mark.parametrize(("count", "size"), [(7, 2), (2, 3), (1, 4), (12, 4)])
def test_everyone_gets_the_same_number_of_batches(count: int, size: int) -> None:
    """B79: uneven data cannot make one process take another step than its peers."""
    shares = [Group(r, size).share(list(range(count))) for r in range(size)]
    assert len({len(s) for s in shares}) == 1
    assert len(shares[0]) >= 1
    if count >= size:
        flat = [b for s in shares for b in s]
        assert len(flat) == len(set(flat))
