"""Send conversations from a jsonl file to an OpenAI-compatible server, many at a time.

The file holds one JSON object a line: ``id`` (string), ``turns`` (list of user turns, in order) and perhaps
``category``. It is read twice, line by line: once to check every line before the first request is sent, once
to send it. So a file of any size needs little memory, and a broken line costs nothing but a message.

Answers go to another jsonl file, one finished conversation a line, which is what ``--resume`` reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_BAD_LINES_KEPT = 5
MAX_BACKOFF_S = 10.0
# vLLM, SGLang and OpenAI all word it so; each answers 400.
_TOO_LONG = re.compile(
    r"maximum context length|context_length_exceeded|longer than the model's", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One line of a prompt file."""

    id: str
    turns: tuple[str, ...]
    """User turns, in order; at least one, none empty."""
    category: str | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no conversation: its number (from 1) and what is wrong with it."""

    line: int
    reason: str


@dataclass(slots=True)
class PromptFileCheck:
    """What one pass over a prompt file found."""

    num_conversations: int = 0
    num_turns: int = 0
    num_bad_lines: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    """The first few only."""


def read_lines(path: Path) -> Iterator[Conversation | BadLine]:
    """Yield each line of a prompt file as a conversation, or as the reason why it is none.

    Blank lines are passed over. Memory is bounded by one line of at most 16 MiB, and one small hash an id.

    Raises:
        InputError: The file cannot be read.
    """
    seen: set[int] = set()
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    yield BadLine(number, f"longer than {MAX_LINE_BYTES:,} bytes")
                elif line.strip():
                    parsed = _parse_line(line)
                    if isinstance(parsed, str):
                        yield BadLine(number, parsed)
                    elif hash(parsed.id) in seen:
                        yield BadLine(number, f"id {parsed.id[:80]!r} was used by an earlier line")
                    else:
                        seen.add(hash(parsed.id))
                        yield parsed
    except OSError as err:
        raise InputError(
            f"prompt file {str(path)!r} cannot be read ({err.strerror or err}); expected a jsonl file with "
            "'id' and 'turns' on each line"
        ) from err


def _parse_line(line: bytes) -> Conversation | str:
    """Return the conversation on a line, or a sentence that says what is wrong."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as err:
        detail = err.msg if isinstance(err, json.JSONDecodeError) else str(err)
        return f"not JSON ({detail})"
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__}; expected an object with 'id' and 'turns'"
    if not isinstance(row.get("id"), (str, int)) or isinstance(row.get("id"), bool) or row["id"] == "":
        return "'id' is missing or is no string"
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        return "'turns' is missing or is no list of strings"
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        return "'turns' holds an entry that is no text"
    if not all(_is_unicode(text) for text in [*turns, str(row["id"])]):
        return "'id' or 'turns' holds half of a surrogate pair"
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        return "'category' is no string"
    return Conversation(id=str(row["id"]), turns=tuple(turns), category=category)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_prompt_file(path: Path, *, limit: int | None = None) -> PromptFileCheck:
    """Read a prompt file once and count what is in it, up to ``limit`` conversations."""
    found = PromptFileCheck()
    for item in read_lines(path):
        if isinstance(item, BadLine):
            found.num_bad_lines += 1
            if len(found.bad_lines) < MAX_BAD_LINES_KEPT:
                found.bad_lines.append(item)
        else:
            found.num_conversations += 1
            found.num_turns += len(item.turns)
        if limit is not None and found.num_conversations >= limit:
            break
    return found


def require_good_prompt_file(
    path: Path, *, limit: int | None = None, skip_bad_lines: bool = False
) -> PromptFileCheck:
    """Check a prompt file and raise unless it can be replayed.

    Raises:
        InputError: A line is broken (unless ``skip_bad_lines``), or no conversation is left. Names the first
            broken lines with their numbers.
    """
    found = check_prompt_file(path, limit=limit)
    if found.num_bad_lines and not skip_bad_lines:
        shown = "".join(f"\n  line {bad.line:,}: {bad.reason}" for bad in found.bad_lines)
        more = found.num_bad_lines - len(found.bad_lines)
        lines = "1 line is" if found.num_bad_lines == 1 else f"{found.num_bad_lines:,} lines are"
        raise InputError(
            f"{path}: {lines} no conversation; nothing was sent. Repair them, or pass "
            f"them over with --skip-bad-lines:{shown}" + (f"\n  and {more:,} more" if more else "")
        )
    if not found.num_conversations:
        raise InputError(f"{path} holds no conversation; expected lines with 'id' and 'turns'")
    return found


def iterate_conversations(path: Path, *, limit: int | None = None, skip: int = 0) -> Iterator[Conversation]:
    """Yield the good conversations of a file: the first ``limit``, without the first ``skip`` of them."""
    count = 0
    for item in read_lines(path):
        if limit is not None and count >= limit:
            return
        if isinstance(item, Conversation):
            count += 1
            if count > skip:
                yield item


# --- results ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """What came of one conversation; one line of the answer file."""

    id: str
    turns: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    category: str | None = None
    outcome: str = "done"
    """``done``, ``too_long`` (a prompt does not fit the model's context) or ``failed``."""
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True)
class ReplayResult:
    """Sums over one replay. ``requests`` counts HTTP requests that were answered, one a turn."""

    conversations: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    too_long: int = 0
    failed: int = 0
    resumed: int = 0
    """Conversations that an earlier run had answered."""
    bad_lines: int = 0
    retries: int = 0
    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Seconds from sending to the whole answer, one entry a request."""
    errors: list[str] = field(default_factory=list)
    """The first few distinct messages."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.completion_tokens / self.wall_s if self.wall_s else 0.0

    def latency_s(self, fraction: float) -> float | None:
        """Return the latency, in seconds, that ``fraction`` of the requests stayed below, if any ran."""
        if not self.latencies_s:
            return None
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

    def to_json(self) -> dict[str, Any]:
        """Return the counts and the latencies' median and 95th percentile as JSON-able values."""
        out = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in {"latencies_s", "errors"}
        }
        return out | {
            "output_tokens_per_s": self.output_tokens_per_s,
            "latency_p50_s": self.latency_s(0.5),
            "latency_p95_s": self.latency_s(0.95),
            "errors": self.errors,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """How to send. Times in seconds."""

    url: str = "http://127.0.0.1:8000/v1"
    model: str = "auto"
    """Model name to ask for; ``auto`` takes the only (or first) one that the server offers."""
    concurrency: int = 32
    rate: float | None = None
    """Requests started per second, evenly spaced; None sends as fast as ``concurrency`` allows."""
    max_tokens: int = 256
    temperature: float = 0.0
    multi_turn: bool = False
    """Send every turn, each after the model's answer to the one before; False sends first turns only."""
    retries: int = 5
    """Tries after the first for connection errors, timeouts, 408, 409, 429 and 5xx."""
    timeout_s: float = 600.0
    api_key: str | None = None
    """None takes OPENAI_API_KEY, or a placeholder, since vLLM needs none by default."""
    extra_body: dict[str, Any] | None = None
    """More fields of the request, for example ``{"vllm_xargs": {"specdec_tap": 0}}``."""


# --- the answer file --------------------------------------------------------------------------------------


class AnswerFile:
    """Appends answers to a jsonl file, each line flushed, so that a killed run loses nothing it had.

    Raises:
        InputError: The file exists and ``resume`` is False, or it cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.answered: set[str] = set()
        if path.exists() and not resume:
            raise InputError(
                f"{path} exists; add --resume to send only what it lacks, or name another file with --out"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._read_answered()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._file: IO[bytes] = os.fdopen(descriptor, "ab")
        except OSError as err:
            raise InputError(
                f"answer file {str(path)!r} cannot be written ({err.strerror or err}); "
                "name another with --out"
            ) from err

    def _read_answered(self) -> None:
        """Collect the ids that need no second try; cut off a last line that was left half-written."""
        with self.path.open("r+b") as file:
            whole = 0
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(whole)
                    break
                whole += len(line)
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    row = json.loads(line)
                    if row["outcome"] != "failed":
                        self.answered.add(row["id"])

    def append(self, answer: Answer) -> None:
        """Write one line. Raises InputError if the disk refuses it."""
        try:
            self._file.write((json.dumps(answer.to_json()) + "\n").encode())
            self._file.flush()
        except OSError as err:
            raise InputError(
                f"answer file {str(self.path)!r} cannot be written ({err.strerror or err}); "
                "free some space, then repeat the command with --resume"
            ) from err

    def close(self) -> None:
        self._file.close()


# --- sending ----------------------------------------------------------------------------------------------


class _Pacer:
    """Hands out starting times, ``1 / rate`` seconds apart. A slow server is not caught up on in a burst."""

    def __init__(self, rate: float | None) -> None:
        self._interval = 0.0 if rate is None else 1.0 / rate
        self._next = 0.0

    async def wait(self) -> None:
        if not self._interval:
            return
        now = time.monotonic()
        start = max(now, self._next)
        self._next = start + self._interval
        if start > now:
            await asyncio.sleep(start - now)


def _require_openai() -> Any:
    try:
        import openai
    except ImportError as err:
        raise InputError(
            "the openai client is not installed; install it with 'pip install \"specdec-tap[client]\"'"
        ) from err
    return openai


@contextlib.asynccontextmanager
async def _open_client(options: ReplayOptions) -> AsyncIterator[AsyncOpenAI]:
    openai = _require_openai()
    from .serving import is_loopback

    arguments: dict[str, Any] = {}
    if is_loopback(options.url):
        # A proxy from the environment must not come between this process and a server beside it.
        arguments["http_client"] = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=options.timeout_s)
    client = openai.AsyncOpenAI(
        base_url=options.url,
        api_key=options.api_key or os.environ.get("OPENAI_API_KEY") or "none",
        timeout=options.timeout_s,
        max_retries=0,  # retried here, where they are counted
        **arguments,
    )
    async with client:
        yield client


async def _find_model(client: AsyncOpenAI, options: ReplayOptions) -> str:
    """Return the name to send, having proved that a server answers.

    Raises:
        InputError: No server answers, it refuses the key, or it does not offer the model.
    """
    openai = _require_openai()
    try:
        names = [model.id for model in (await client.models.list()).data]
    except openai.APIConnectionError as err:
        raise InputError(
            f"no server answers at {options.url} ({_cause(err)}); start one with 'vllm serve MODEL', "
            "or name its address with --url"
        ) from err
    except openai.APIStatusError as err:
        what = "set OPENAI_API_KEY" if err.status_code in (401, 403) else "expected an address ending in /v1"
        raise InputError(f"{options.url}/models answers {err.status_code}; {what}") from err
    except (openai.OpenAIError, ValueError, TypeError, AttributeError) as err:
        raise InputError(
            f"{options.url}/models does not answer as the OpenAI API does ({err}); check --url"
        ) from err
    if options.model == "auto":
        if not names:
            raise InputError(f"{options.url} offers no model; name one with --model")
        return names[0]
    if options.model not in names:
        raise InputError(
            f"model {options.model!r} is not served at {options.url}; it offers {', '.join(map(repr, names))}"
        )
    return options.model


def _cause(err: BaseException) -> str:
    """Return the innermost reason of a chained exception, in a few words."""
    while (inner := err.__cause__ or err.__context__) is not None:
        err = inner
    return str(err).strip() or type(err).__name__


class _Sender:
    """The state that the workers of one replay share."""

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        options: ReplayOptions,
        result: ReplayResult,
        on_progress: Callable[[ReplayResult], None] | None,
    ) -> None:
        self.client, self.model, self.options, self.result = client, model, options, result
        self.on_progress = on_progress
        self.pacer = _Pacer(options.rate)
        self.openai = _require_openai()
        self.unanswered_in_a_row = 0

    async def converse(self, conversation: Conversation) -> Answer:
        """Send a conversation's turns; never raises for what the server answers."""
        openai = self.openai
        answer = Answer(id=conversation.id, category=conversation.category)
        messages: list[dict[str, str]] = []
        for turn in conversation.turns if self.options.multi_turn else conversation.turns[:1]:
            messages.append({"role": "user", "content": turn})
            answer.turns.append(turn)
            try:
                text = await self._ask(messages, answer)
            except openai.BadRequestError as err:
                message = str(err)
                answer.outcome = "too_long" if _TOO_LONG.search(message) else "failed"
                answer.error = message[:1000]
                break
            except openai.OpenAIError as err:
                answer.outcome = "failed"
                text = str(err) if isinstance(err, openai.APIStatusError) else _cause(err)
                answer.error = f"{type(err).__name__}: {text}"[:1000]
                if isinstance(err, (openai.APIConnectionError, openai.InternalServerError)):
                    self.unanswered_in_a_row += 1
                break
            self.unanswered_in_a_row = 0
            messages.append({"role": "assistant", "content": text})
        return answer

    async def _ask(self, messages: list[dict[str, str]], answer: Answer) -> str:
        openai, options, result = self.openai, self.options, self.result
        for attempt in range(options.retries + 1):
            await self.pacer.wait()
            begun = time.monotonic()
            try:
                completion = await self.client.chat.completions.create(
                    model=self.model,
                    messages=messages,  # type: ignore[arg-type]
                    max_tokens=options.max_tokens,
                    temperature=options.temperature,
                    extra_body=options.extra_body,
                )
                break
            except (openai.APIConnectionError, openai.APIStatusError) as err:
                status = getattr(err, "status_code", None)
                again = status is None or status in (408, 409, 429) or status >= 500
                if not again or attempt == options.retries:
                    raise
                result.retries += 1
                # Full jitter: 32 workers that failed together must not come back together.
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.5 * 2**attempt) * (0.5 + random.random() / 2))
        result.latencies_s.append(time.monotonic() - begun)
        if not getattr(completion, "choices", None):
            raise openai.OpenAIError("the answer holds no choice; is this an OpenAI-compatible server?")
        choice = completion.choices[0]
        text = choice.message.content or ""
        answer.answers.append(text)
        answer.finish_reasons.append(choice.finish_reason)
        usage = completion.usage
        answer.prompt_tokens.append(usage.prompt_tokens if usage else 0)
        answer.completion_tokens.append(usage.completion_tokens if usage else 0)
        result.requests += 1
        result.prompt_tokens += answer.prompt_tokens[-1]
        result.completion_tokens += answer.completion_tokens[-1]
        if self.on_progress is not None:
            self.on_progress(result)
        return text


async def replay_async(
    conversations: Iterator[Conversation],
    options: ReplayOptions,
    *,
    on_answer: Callable[[Answer], None] | None = None,
    on_progress: Callable[[ReplayResult], None] | None = None,
    result: ReplayResult | None = None,
) -> ReplayResult:
    """Send conversations, ``options.concurrency`` at a time, and return the sums.

    Args:
        conversations: Pulled lazily, so that memory does not grow with their number.
        options: Where and how to send.
        on_answer: Called with each finished conversation, in the order in which they finish.
        on_progress: Called after each answered request and each finished conversation.
        result: Sums to add to; kept up to date even when this function is interrupted.

    Raises:
        InputError: The server cannot be reached at the start, does not offer the model, or is lost on the way
            (as many conversations in a row as there are workers got no answer or a 5xx, retries included).
    """
    result = ReplayResult() if result is None else result
    async with _open_client(options) as client:
        model = await _find_model(client, options)
        sender = _Sender(client, model, options, result, on_progress)
        lost = asyncio.Event()

        async def work() -> None:
            for conversation in conversations:  # one iterator, shared: each worker takes the next
                answer = await sender.converse(conversation)
                result.conversations += 1
                if answer.outcome == "too_long":
                    result.too_long += 1
                elif answer.outcome == "failed":
                    result.failed += 1
                    if len(result.errors) < 5 and answer.error not in result.errors:
                        result.errors.append(answer.error or "")
                if on_answer is not None:
                    on_answer(answer)
                if on_progress is not None:
                    on_progress(result)
                if sender.unanswered_in_a_row >= max(3, options.concurrency):
                    lost.set()
                if lost.is_set():
                    return

        begun = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(options.concurrency):
                    group.create_task(work())
        except* InputError as group_err:
            raise group_err.exceptions[0] from None
        finally:
            result.wall_s += time.monotonic() - begun
        if lost.is_set():
            raise InputError(
                f"the server at {options.url} stopped answering after {result.requests:,} requests "
                f"({result.errors[-1] if result.errors else 'no connection'}); start it again, "
                "then repeat the command with --resume"
            )
    return result


def replay(
    conversations: Iterator[Conversation],
    options: ReplayOptions,
    *,
    on_answer: Callable[[Answer], None] | None = None,
    on_progress: Callable[[ReplayResult], None] | None = None,
    result: ReplayResult | None = None,
) -> ReplayResult:
    """Run :func:`replay_async` to its end."""
    return asyncio.run(
        replay_async(conversations, options, on_answer=on_answer, on_progress=on_progress, result=result)
    )
