"""The worker's end of the connection to the writer process: messages in order, never waited for.

The worker's thread posts messages and sends what can be sent. A helper thread does three things that
must not cost a request time: it sends what is left over once the engine has gone idle, it notices that the
writer died, and it starts another one. The worker's thread takes the new writer over with :meth:`adopt`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ..capture import protocol
from ..capture.ring import Ring
from ..errors import ConfigError
from ..shards.layout import ShardHeader

logger = logging.getLogger("vllm.specdec_tap")  # inside vLLM only the "vllm" logger has a handler

WRITER_START_TIMEOUT_S = 60.0
WRITER_END_TIMEOUT_S = 120.0
RESTART_INTERVAL_S = 5.0
IDLE_INTERVAL_S = 1.0
PUMP_INTERVAL_S = 0.02
OPENMP_PREFIXES = ("GOMP_", "KMP_", "OMP_")


class Ticket(Protocol):
    """Something a message has to wait for; a CUDA event is one."""

    def query(self) -> bool: ...


class WriterChannel:
    """One writer process at a time, over one ring.

    Args:
        ring: Shared with the writer.
        header: What its shards say of themselves; each writer gets a stream name of its own.
        hello: Makes the rest of the first message: settings, sizes, state.

    Raises:
        ConfigError: The first writer process cannot start or cannot use its folder.
    """

    def __init__(self, ring: Ring, header: ShardHeader, hello: Callable[[], dict[str, Any]]) -> None:
        self._ring, self._hello = ring, hello
        self._outbox: deque[tuple[Ticket | None, bytes]] = deque()
        self._sending = threading.RLock()
        self._wake = threading.Event()
        self._closed = self._finished = False
        self.lost = False
        self._ready: tuple[socket.socket, ShardHeader] | None = None
        self._socket, self.header = self._start(header)
        threading.Thread(target=self._help, name="specdec-tap-channel", daemon=True).start()

    # -- the worker's thread --------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Messages that are not sent yet."""
        return len(self._outbox)

    def post(self, message: bytes, ticket: Ticket | None = None) -> None:
        """Queue a message, to be sent once ``ticket.query()`` is true; later messages wait behind it."""
        self._outbox.append((ticket, message))

    def pump(self) -> None:
        """Send what can be sent now."""
        if self._outbox and self._sending.acquire(blocking=False):  # else the helper is sending
            try:
                while self._outbox and not self.lost:
                    ticket, message = self._outbox[0]
                    if ticket is not None and not ticket.query():
                        break
                    self._socket.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    self._outbox.popleft()
            except BlockingIOError:
                pass
            except OSError:
                self.lost = True
            finally:
                self._sending.release()
        if self._outbox or self.lost:
            self._wake.set()

    def adopt(self) -> bool:
        """After a loss: take over the new writer if there is one by now. What was queued is gone."""
        if self._ready is None:
            return False
        with self._sending:
            self._socket.close()
            self._outbox.clear()
            self._socket, self.header = self._ready
            self._ring.reset()
            self.lost = False
            self._ready = None  # last: the helper starts a writer where one is lost and none is ready
        self._ring.worker.add("writer_restarts")
        return True

    def replace(self, header: ShardHeader) -> None:
        """Let the writer seal its stream and start another one; waits for both (not for the serving path)."""
        with self._sending:
            self.finish()
            self._outbox.clear()
            if self._ready is not None:  # started for the old header
                self._ready[0].close()
                self._ready = None
            self._socket, self.header = self._start(header)
            self._ring.reset()
            self.lost = self._finished = False

    def finish(self) -> None:
        """Send everything, tell the writer that no more will come, wait until it has sealed and left."""
        deadline = time.monotonic() + WRITER_END_TIMEOUT_S
        while self._outbox and not self.lost and time.monotonic() < deadline:
            self.pump()
            time.sleep(0.001)
        with self._sending:
            self._finished = True  # to the helper, a writer that leaves would look like one that died
            try:
                self._socket.shutdown(socket.SHUT_WR)
                self._socket.settimeout(max(deadline - time.monotonic(), 0.1))
                while self._socket.recv(64):
                    pass
            except OSError as err:
                logger.warning("the writer process did not say that it has sealed its shards (%s)", err)
            self._socket.close()

    def close(self) -> None:
        """Stop the helper and let go of the writer, which then seals what it holds."""
        self._closed = True
        self._wake.set()
        self._socket.close()

    # -- the helper's thread --------------------------------------------------------------------------

    def _help(self) -> None:
        while not self._closed:
            self._wake.wait(IDLE_INTERVAL_S)
            self._wake.clear()
            if self._closed:
                return
            if self.lost:
                if self._ready is None:
                    self._try_to_start()
                continue
            try:
                self.pump()
                if self._outbox:
                    time.sleep(PUMP_INTERVAL_S)
                elif self._peer_is_gone():
                    self.lost = True
                    self._wake.set()
            except Exception:  # without this thread a queued message would wait for the next engine step
                logger.exception("sending to the writer failed; it is tried again")

    def _peer_is_gone(self) -> bool:
        if self._finished or not self._sending.acquire(blocking=False):
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._sending.release()

    def _try_to_start(self) -> None:
        try:
            header = self.header
            ready = self._start(header)
        except Exception as err:  # a thread of its own: report and try again
            logger.error(
                "the writer process cannot be started again (%s); next try in %gs", err, RESTART_INTERVAL_S
            )
            time.sleep(RESTART_INTERVAL_S)
            return
        with self._sending:
            if self.lost and header is self.header:
                self._ready = ready
            else:  # replaced meanwhile: this one would write under the old header
                ready[0].close()

    # -- either ---------------------------------------------------------------------------------------

    def _start(self, header: ShardHeader) -> tuple[socket.socket, ShardHeader]:
        """Start a writer process with a stream of its own and wait until it has opened it."""
        rank = header.engine.get("dp_rank", 0)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        header = header.replace(stream=f"{stamp}-r{rank}-{os.urandom(3).hex()}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
                command = [sys.executable, "-m", "specdec_tap.capture.writer_process"]
                command += [str(theirs.fileno()), str(self._ring.fd), str(self._ring.size)]
                with elsewhere():
                    process = subprocess.Popen(
                        command,
                        env=environment(),
                        pass_fds=(theirs.fileno(), self._ring.fd),
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
            ours.settimeout(WRITER_START_TIMEOUT_S)
            ours.send(protocol.pack_json(protocol.HELLO, {"header": header.to_json(), **self._hello()}))
            answer = ours.recv(1 << 16)
            problem = json.loads(answer)["error"] if answer else "it ended; see its messages above"
            if problem:
                raise ConfigError(f"the writer process cannot start: {problem}")
        except OSError as err:
            ours.close()
            raise ConfigError(f"the writer process did not start ({err})") from err
        except ConfigError:
            ours.close()
            raise
        finally:
            if process is not None:  # it forked and left at once; the writer itself is nobody's child
                process.kill()
                process.wait()
        ours.settimeout(None)
        return ours, header


def environment() -> dict[str, str]:
    """The worker's environment without what is meant for its own compute threads: vLLM's CPU backend preloads
    libgomp and gives it a list of cores, to which it pins whatever is started, before its first instruction.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(OPENMP_PREFIXES)}


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """What is started inside runs on the cores of this process's parent to which no thread here is pinned, or
    on all of the parent's if there are no such.

    vLLM pins its workers' threads, on a CPU to the cores that compute: a writer there would wait for the
    worker or interrupt it.
    """
    own = os.sched_getaffinity(0)  # of this thread; what it starts inherits it
    with contextlib.suppress(OSError):
        allowed = os.sched_getaffinity(os.getppid())
        os.sched_setaffinity(0, allowed - pinned_cores(allowed) or allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def pinned_cores(allowed: set[int]) -> set[int]:
    """Cores to which threads of this process are pinned that may not use all of ``allowed``."""
    cores: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            own = os.sched_getaffinity(int(task.name))
            if own < allowed:
                cores |= own
    return cores
