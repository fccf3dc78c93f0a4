"""A disk that hangs, and readers that die: the worker waits for neither (B30, B33)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fake_engine import NUM_AUX, FakeRunner, make_tap, new_request, schedule

from specdec_tap import open_shards
from specdec_tap.cli import main

HIDDEN = 16
V1 = FakeRunner("v1", HIDDEN)

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

/* Regular files only: sockets and pipes are no disk. */
static void hang(int fd) {
    struct stat found;
    const char *flag = getenv("HANGING_DISK");
    if (flag == NULL || fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) return;
    while (access(flag, F_OK) == 0) usleep(5000);
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
int fsync(int fd) { hang(fd); return REAL(fsync)(fd); }
int fdatasync(int fd) { hang(fd); return REAL(fdatasync)(fd); }
ssize_t write(int fd, const void *data, size_t size) { hang(fd); return REAL(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    hang(fd); return REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    hang(fd); return REAL(pwrite64)(fd, data, size, at);
}
"""


def wait(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def outcomes(tap) -> dict[str, int]:
    """How many requests ended how, over worker and writer."""
    status = tap.status()
    out: dict[str, int] = {}
    for side in ("worker", "writer"):
        for name, value in status[side].items():
            if value and (name == "requests_sealed" or name.startswith(("dropped_", "skipped_"))):
                out[name] = out.get(name, 0) + value
    return out


def ask(tap, name: str, rows: int = 200) -> torch.Tensor:
    """One request of one step; returns its states."""
    number = int(name.removeprefix("r"))
    prompt = np.random.default_rng(number).integers(1, 900, rows).tolist()
    states = torch.randn(NUM_AUX + 1, rows, HIDDEN).bfloat16()
    tap.on_schedule(schedule([new_request(name, prompt, max_tokens=1)]))
    tap.on_step(V1.step([name], [rows], [0], prompt, [[2]], states))
    tap.on_schedule(schedule(finished=[name]))
    return states


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file is there, every write and fsync of the writer process hangs; ours do not."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a disk hang with")
    (tmp_path / "shim.c").write_text(SHIM)
    command = [compiler, "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"]
    subprocess.run(command, check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "shim.so"))
    monkeypatch.setenv("HANGING_DISK", str(tmp_path / "hang"))
    return tmp_path / "hang"


def test_a_disk_that_hangs_costs_whole_requests_and_is_not_waited_for(hanging: Path, tmp_path: Path) -> None:
    """It hangs until all requests were served: were it waited for, this test would never end."""
    tap = make_tap(
        tmp_path / "shards", hidden_size=HIDDEN, ring_bytes=1 << 20, max_shard_bytes=1 << 20,
        limits={"max_rows": 256, "max_requests": 8},
    )  # fmt: skip
    fed = {"r0": ask(tap, "r0")}
    wait(lambda: outcomes(tap) == {"requests_sealed": 1})
    hanging.touch()
    for i in range(1, 121):  # 120 x 200 rows x 128 bytes is three times the ring
        fed[f"r{i}"] = ask(tap, f"r{i}")
    assert outcomes(tap)["requests_sealed"] < 40
    assert tap.ring.used_bytes_now() > tap.ring.size // 2
    hanging.unlink()
    wait(lambda: tap.ring.used_bytes_now() == 0)
    for i in range(121, 131):
        fed[f"r{i}"] = ask(tap, f"r{i}")
    tap.channel.finish()
    after = outcomes(tap)
    assert set(after) == {"requests_sealed", "dropped_ring_full"}
    assert after["dropped_ring_full"] > 40
    assert sum(after.values()) == tap.status()["worker"]["requests_started"] == 131
    with open_shards(tmp_path / "shards") as store:
        kept = {record.meta.request_id: record for record in store}
        assert len(kept) == len(store) == after["requests_sealed"]
        assert {f"r{i}" for i in range(121, 131)} <= kept.keys()
        for name, record in kept.items():
            assert not record.gaps
            assert torch.equal(record.aux_torch(), fed[name][:NUM_AUX].transpose(0, 1))
    assert main(["shards", "verify", str(tmp_path / "shards")]) == 0


READER = """
import sys, time
from specdec_tap import open_shards
with open_shards(sys.argv[1], follow=True) as store:
    states = store[0].aux()
    print("reading", flush=True)
    time.sleep(600)
"""


def test_a_reader_killed_while_it_reads_leaves_nothing_behind(tmp_path: Path) -> None:
    """No lock, no file: the writer seals, rotates and removes shards as if nobody had read."""
    shards = tmp_path / "shards"
    tap = make_tap(shards, hidden_size=HIDDEN)
    ask(tap, "r0")
    tap.control("flush")
    wait(lambda: outcomes(tap) == {"requests_sealed": 1} and list(shards.glob("*/*.open")))
    wait(lambda: tap.status()["writer"]["controls_done"] >= 2)  # the cache's size, and the flush
    before = sorted(path.name for path in shards.rglob("*"))
    reader = subprocess.Popen([sys.executable, "-c", READER, str(shards)], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout.readline() == "reading\n"
    finally:
        os.kill(reader.pid, signal.SIGKILL)
        reader.communicate()
    assert sorted(path.name for path in shards.rglob("*")) == before
    tap.control("rotate")
    for i in range(1, 4):
        ask(tap, f"r{i}")
    tap.channel.finish()
    assert outcomes(tap) == {"requests_sealed": 4}
    with open_shards(shards) as store:
        assert [record.meta.request_id for record in store] == ["r0", "r1", "r2", "r3"]


def test_the_worker_encodes_no_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B30: a codec or a serializer in the worker would hold its GIL. Here they are only in the writer."""
    from specdec_tap.shards import codec

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("states were encoded in the worker's process")

    for name in ("encode_lossless", "encode_fp8", "encode_int8"):  # what encode_block calls, whoever calls it
        monkeypatch.setattr(codec, name, forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    for name in ("safetensors.torch", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    dumps, written = json.dumps, []

    def counting(*args: object, **kwargs: object) -> str:
        text = dumps(*args, **kwargs)
        written.append(len(text))
        return text

    monkeypatch.setattr(json, "dumps", counting)
    tap = make_tap(tmp_path / "shards", hidden_size=HIDDEN)
    started = sum(written)
    states = ask(tap, "r0", rows=500)
    tap.channel.finish()
    assert 0 < sum(written) - started < 2000 < states.numel()
    assert outcomes(tap) == {"requests_sealed": 1}


def peak_bytes(pid: int | str = "self") -> int:
    """Most memory that a process has held since ``forget_peak``."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


def forget_peak(pid: int | str = "self") -> None:
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError as err:
        pytest.skip(f"this kernel does not forget a process's peak ({err})")


def test_memory_does_not_grow_with_the_length_of_a_request(tmp_path: Path) -> None:
    """B41: 40,000 rows of 4 KB in steps of 128, 160 MB; the worker's peak and the writer's stay."""
    hidden, rows = 512, 128
    wide = FakeRunner("v1", hidden)
    tap = make_tap(
        tmp_path / "shards", hidden_size=hidden, ring_bytes=8 << 20, codec="fp8",
        limits={"max_rows": rows, "max_requests": 8, "max_model_len": 50_000},
    )  # fmt: skip
    wait(lambda: list((tmp_path / "shards").glob("*/.status.json")))
    (status,) = (tmp_path / "shards").glob("*/.status.json")
    writer = json.loads(status.read_text())["pid"]
    states = torch.randn(NUM_AUX + 1, rows, hidden).bfloat16()

    def serve(name: str, length: int) -> None:
        prompt = [1 + i % 900 for i in range(length)]
        tap.on_schedule(schedule([new_request(name, prompt, max_tokens=1)]))
        for first in range(0, length, rows):
            wait(lambda: tap.ring.used_bytes_now() < 4 << 20)
            last = first + rows == length
            tap.on_step(
                wide.step([name], [rows], [first], prompt[first : first + rows], [[2]], states, [not last])
            )
            tap.on_schedule(schedule())
        tap.on_schedule(schedule(finished=[name]))

    serve("short", 20 * rows)
    wait(lambda: outcomes(tap) == {"requests_sealed": 1})
    forget_peak()
    forget_peak(writer)
    before = peak_bytes(), peak_bytes(writer)
    serve("long", 40_064)
    wait(lambda: outcomes(tap) == {"requests_sealed": 2})
    assert peak_bytes() - before[0] < 24 << 20
    assert peak_bytes(writer) - before[1] < 24 << 20
    tap.channel.finish()
    with open_shards(tmp_path / "shards") as store:
        assert sorted(record.num_rows for record in store) == [20 * rows, 40_064]
