"""Run ``vllm serve`` as a child process: start, wait until it answers, read its counters, stop it.

Used by the demo and by ``specdec-tap eval``. Nothing here imports vLLM: the server is the same program a user
starts, and it is talked to over HTTP only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from .errors import InputError

LOOPBACK = "127.0.0.1"
LOG_TAIL_BYTES = 256 * 1024
MAX_METRICS_BYTES = 64 * 1024 * 1024
# A line of the server's log that says why it died, as opposed to the traceback around it.
_REASON = re.compile(
    r"^(?:\([^)]*\)\s*)?(?:(?:ERROR|CRITICAL)\s.*?\]\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$"
)
# What vLLM puts in front of each line of a process: "(EngineCore pid=123) ".
_PREFIX = re.compile(r"^\([^)]*\)\s*")
_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

# A loopback server is never behind a proxy, whatever http_proxy says.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port(host: str = LOOPBACK) -> int:
    """Return a TCP port of ``host`` that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def check_port_is_free(port: int, host: str = LOOPBACK) -> None:
    """Raise InputError if something already listens on ``host:port`` or the port may not be used."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except (OSError, OverflowError) as err:
            reason = getattr(err, "strerror", None) or str(err)
            raise InputError(
                f"port {port} on {host} cannot be used ({reason}); "
                "stop what uses it, or choose another with --port"
            ) from err


def vllm_command() -> list[str]:
    """Return the argv prefix that runs vLLM's command line in this Python environment.

    Raises:
        InputError: If vLLM is not installed beside specdec-tap.
    """
    script = Path(sys.executable).with_name("vllm")
    if script.exists():
        return [str(script)]
    if importlib.util.find_spec("vllm") is not None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    if found := shutil.which("vllm"):
        return [found]
    raise InputError(
        f"vLLM is not installed in {sys.prefix}; install it with 'pip install \"specdec-tap[vllm]\"' "
        "(on a machine without a GPU: 'make setup')"
    )


def vllm_version() -> str | None:
    """Return the installed vLLM's version without importing it; None when it is absent."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build (its version says so)."""
    return "cpu" in (vllm_version() or "")


def default_arguments() -> list[str]:
    """Arguments for short runs: the CPU build compiles for minutes unless it is told not to, and answers ten
    times slower in bfloat16 where the CPU multiplies it element by element."""
    if not is_cpu_build():
        return []
    return ["--enforce-eager"] if has_fast_bfloat16() else ["--enforce-eager", "--dtype", "float32"]


def has_fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether matrix products in bfloat16 are fast on this CPU: AVX-512 on x86, ``bf16`` on Arm."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return True  # not Linux: leave the model's dtype alone
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return found is None or bool({"avx512bw", "bf16"} & set(found[1].split()))


def check_model(model: str) -> None:
    """Raise InputError if ``model`` names a local folder that is missing or holds no model.

    A bare ``org/name`` that does not exist on disk may be a Hugging Face name, so vLLM decides about it.
    """
    path = Path(model)
    looks_local = path.exists() or model.startswith(("/", "./", "../", "~")) or model.count("/") != 1
    if not looks_local:
        return
    if not path.exists():
        raise InputError(
            f"model {model!r} does not exist; give a Hugging Face folder or an org/name from the hub"
        )
    if not (path / "config.json").is_file():
        raise InputError(f"model {model!r} has no config.json; give a folder saved with save_pretrained")


class VllmServer:
    """One ``vllm serve`` process on loopback, in a process group of its own.

    Example:
        with VllmServer("models/smollm2", log_path=Path("serve.log")) as server:
            requests.get(server.url + "/models")

    Entering the context starts the server and waits until ``/health`` answers; leaving it stops the server
    and the rest of its process group, and waits for them. Standard output and error go to ``log_path``.

    Args:
        model: Folder or hub name, passed to vLLM as it is.
        log_path: File that receives the server's output; its folder is made, an old one replaced.
        arguments: More arguments of ``vllm serve``, for example ``["--max-model-len", "4096"]``.
        env: Environment variables for the server on top of this process's own. A value of None removes one.
        port: TCP port; None picks a free one.
        startup_timeout_s: How long to wait for ``/health``, in seconds.
        stop_timeout_s: How long a stopping server (and the tap's writer, which seals its shard) may take
            before it is killed, in seconds.
    """

    def __init__(
        self,
        model: str,
        *,
        log_path: Path,
        arguments: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        port: int | None = None,
        startup_timeout_s: float = 900.0,
        stop_timeout_s: float = 120.0,
    ) -> None:
        self.model = model
        self.log_path = Path(log_path)
        self.port = free_port() if port is None else port
        self.startup_timeout_s = startup_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.startup_s: float | None = None
        self._arguments = list(arguments)
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients, ending in ``/v1``."""
        return f"http://{LOOPBACK}:{self.port}/v1"

    @property
    def argv(self) -> list[str]:
        """The command that is run, without the path of the ``vllm`` script."""
        return ["vllm", "serve", self.model, "--host", LOOPBACK, "--port", str(self.port), *self._arguments]

    @property
    def pid(self) -> int | None:
        """Process id of the server, None before it is started."""
        return None if self._process is None else self._process.pid

    def shell_command(self) -> str:
        """The command with the environment variables that matter, ready to be pasted into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self._env.items() if value is not None]
        return " ".join([*variables, shlex.join(self.argv)])

    def environment(self) -> dict[str, str]:
        """The server's environment: this process's, CPU defaults, then the ``env`` argument."""
        env = dict(os.environ)
        env.setdefault("VLLM_NO_USAGE_STATS", "1")
        if is_cpu_build():
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        if Path(self.model).is_dir():
            env.setdefault("HF_HUB_OFFLINE", "1")
        for name, value in self._env.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env

    def start(self) -> None:
        """Start the process and return at once; ``wait_until_ready`` waits.

        Raises:
            InputError: The model folder is missing, the port is taken, or vLLM is not installed.
        """
        if self._process is not None:
            raise RuntimeError("this server was started before; make a new VllmServer")
        check_model(self.model)
        check_port_is_free(self.port)
        command = vllm_command() + self.argv[1:]
        self.log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            log.write(f"$ {self.shell_command()}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )

    def wait_until_ready(self, on_wait: Callable[[float], None] | None = None) -> None:
        """Return when ``/health`` answers 200.

        Args:
            on_wait: Called about twice a second, with the seconds waited so far.

        Raises:
            InputError: The process ended, or ``startup_timeout_s`` passed; the message holds the reason found
                in the log and where the log is.
        """
        process = self._started()
        begun = time.monotonic()
        while True:
            waited = time.monotonic() - begun
            code = process.poll()
            if code is not None:
                raise InputError(
                    f"'{shlex.join(self.argv)}' ended with exit code {code} after {waited:.0f} s: "
                    + self.death_reason()
                )
            if self.is_healthy():
                self.startup_s = waited
                return
            if waited > self.startup_timeout_s:
                raise InputError(
                    f"'{shlex.join(self.argv)}' did not answer /health within "
                    f"{self.startup_timeout_s:.0f} s; the log is {self.log_path}, its end:\n{self.log_tail()}"
                )
            if on_wait is not None:
                on_wait(waited)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)

    def is_healthy(self) -> bool:
        """Whether ``/health`` answers 200 now."""
        try:
            with _direct.open(f"http://{LOOPBACK}:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:  # refused, reset, timed out, or an HTTP error status
            return False

    def has_died(self, patience_s: float = 10.0) -> bool:
        """Whether the process has ended by itself; a dying engine takes a few seconds to end its server."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0 if self.is_healthy() else patience_s)
        return self._process.poll() is not None

    def metrics(self) -> list[Sample]:
        """Read the server's ``/metrics``."""
        return read_metrics(self.url)

    def stop(self) -> int | None:
        """Stop the server and wait for its whole process group; return its exit code.

        SIGTERM goes to the server alone first: it drains and ends its engine, and the tap's writer then finds
        the end of its input and seals the open shard. What is left after ``stop_timeout_s`` is killed.
        """
        process = self._process
        if process is None:
            return None
        deadline = time.monotonic() + self.stop_timeout_s
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=self.stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        while _group_is_alive(process.pid):
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.05)
        return process.returncode

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the log; empty when there is none."""
        return "\n".join(self._tail_lines()[-lines:])

    def death_reason(self) -> str:
        """Return the last exception named in the log, and where the log is; else the log's last lines."""
        lines = self._tail_lines()
        reasons = []
        for i, line in enumerate(lines):
            if match := _REASON.match(line.strip()):
                # pydantic puts what is wrong on the lines after "1 validation error for ...".
                more = [_PREFIX.sub("", text).strip() for text in lines[i + 1 : i + 4]]
                is_headline = match.group(1).endswith(":") or "validation error" in match.group(1)
                reasons.append(" ".join([match.group(1), *more] if is_headline else [match.group(1)]))
        # The last ones in vLLM's log are often "Engine core initialization failed. See root cause above".
        causes = [reason for reason in reasons if "root cause" not in reason]
        if causes:
            return f"{causes[-1][:2000]} (log: {self.log_path})"
        return f"the log is {self.log_path}, its end:\n" + "\n".join(lines[-15:])

    def _tail_lines(self) -> list[str]:
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
                return log.read(LOG_TAIL_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not started")
        return self._process

    def __enter__(self) -> VllmServer:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:  # also Ctrl-C: no server may be left behind
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _group_is_alive(group: int) -> bool:
    """Whether a process of this group still runs; zombies that nobody waited for do not count."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state ppid pgrp ...; the name may hold spaces and brackets, so cut at the last ')'
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if len(fields) > 2 and int(fields[2]) == group and fields[0] not in "ZX":
            return True
    return False


@contextlib.contextmanager
def stop_on_signal() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that servers started inside are stopped.

    Only the main thread may set signal handlers; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# --- Prometheus text ---------------------------------------------------------------------------------------


class Sample:
    """One line of a Prometheus page: ``name``, ``labels`` and ``value``."""

    __slots__ = ("labels", "name", "value")

    def __init__(self, name: str, labels: dict[str, str], value: float) -> None:
        self.name, self.labels, self.value = name, labels, value

    def __repr__(self) -> str:
        return f"Sample({self.name!r}, {self.labels!r}, {self.value!r})"


def parse_metrics(text: str) -> list[Sample]:
    """Parse the Prometheus text format; lines that are no samples are passed over.

    Example:
        >>> parse_metrics('# HELP x y\\nx_total{position="1"} 3.0')
        [Sample('x_total', {'position': '1'}, 3.0)]
    """
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or line.startswith("#"):
            continue
        with contextlib.suppress(ValueError):
            labels = dict(_LABEL.findall(match.group(2) or ""))
            samples.append(Sample(match.group(1), labels, float(match.group(3))))
    return samples


def read_metrics(url: str, timeout_s: float = 30.0) -> list[Sample]:
    """Read ``/metrics`` of the server whose OpenAI base URL is ``url``.

    Raises:
        InputError: Nothing answers, or the answer is no metrics page.
    """
    address = root_url(url) + "/metrics"
    try:
        with opener_for(url).open(address, timeout=timeout_s) as answer:
            return parse_metrics(answer.read(MAX_METRICS_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError as err:
        raise InputError(f"{address} answers {err.code} {err.reason}; is it a vLLM server?") from err
    except (OSError, ValueError) as err:
        raise InputError(f"{address} cannot be read ({_reason(err)}); is the server running?") from err


def root_url(url: str) -> str:
    """Return the server's address without a trailing ``/v1``.

    Example:
        >>> root_url("http://127.0.0.1:8000/v1/")
        'http://127.0.0.1:8000'
    """
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether ``url`` names this machine, so that no proxy may come between."""
    host = re.sub(r"^[a-z]+://", "", url).split("/")[0]
    return bool(re.match(r"^(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:\d+)?$", host))


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """Return a urllib opener that passes by proxies for loopback addresses."""
    return _direct if is_loopback(url) else urllib.request.build_opener()


def _reason(err: BaseException) -> str:
    inner = getattr(err, "reason", err)
    return str(getattr(inner, "strerror", None) or inner)
