"""Conversations with their answers, as token ids with response spans: the input of ``specdec-tap extract``.

A line of the file is ``{"id": ..., "messages": [{"role": ..., "content": ...}, ...]}``, or a line that
``specdec-tap replay --out`` wrote (``id``, ``turns``, ``answers``). Spans are found without looking for marks
in the text: the chat template is applied to each beginning of the conversation, and what it adds for an
answer is the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError

MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARS = 240
"""vLLM appends nine characters to a request's id, and shards keep 256."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Chat:
    """One line: messages that end with an answer."""

    id: str
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class TokenizedChat:
    """A conversation as the model sees it."""

    id: str
    token_ids: list[int]
    spans: list[tuple[int, int]]
    """Half-open ranges of answers, end-of-turn token included."""


def read_chats(path: Path, *, limit: int | None = None) -> Iterator[Chat]:
    """Conversations of a file, in order; blank lines are passed over. Memory is bounded by one line.

    Raises:
        InputError: A line is no conversation with an answer, or an id comes twice; names the line.
    """
    seen: set[int] = set()
    try:
        with path.open("rb") as file:
            number = 0
            while (limit is None or len(seen) < limit) and (line := file.readline(MAX_LINE_BYTES + 1)):
                number += 1
                if not line.strip():
                    continue
                try:
                    if len(line) > MAX_LINE_BYTES:
                        raise ValueError(f"is longer than {MAX_LINE_BYTES:,} bytes")
                    chat = parse_chat(json.loads(line))
                    if hash(chat.id) in seen:
                        raise ValueError(f"has the id {chat.id[:80]!r} of an earlier line")
                except (ValueError, RecursionError) as err:
                    what = f"is not JSON ({err})" if isinstance(err, json.JSONDecodeError) else str(err)
                    raise InputError(
                        f"{path}, line {number:,}: {what}; expected 'id' and 'messages', or a line of "
                        "'specdec-tap replay --out'"
                    ) from err
                seen.add(hash(chat.id))
                yield chat
    except OSError as err:
        raise InputError(f"{str(path)!r} cannot be read: {err.strerror or err}") from err


def parse_chat(row: Any) -> Chat:
    """One parsed line.

    Raises:
        ValueError: It is no conversation that holds an answer; the message says why.
    """
    if not isinstance(row, dict):
        raise ValueError(f"is a JSON {type(row).__name__}")
    name = row.get("id")
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise ValueError("'id' is missing or is no string")
    messages = row.get("messages")
    if messages is None and isinstance(row.get("turns"), list) and isinstance(row.get("answers"), list):
        messages = []
        for turn, answer in zip(row["turns"], row["answers"], strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' is missing or empty")
    out = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(
                f"holds a message without a role of {', '.join(ROLES)} or without text as its content"
            )
        out.append({"role": role, "content": content})
    while out and out[-1]["role"] != "assistant":
        out.pop()  # a question that nobody answered trains nothing
    if not out:
        raise ValueError("holds no message of the assistant")
    return Chat(str(name)[-MAX_ID_CHARS:], tuple(out))


class ChatTokenizer:
    """The model's tokenizer and chat template."""

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        """Load them.

        Args:
            model: Folder or hub name.
            trust_remote_code: Let the model's own tokenizer code run, as ``vllm serve`` would.

        Raises:
            InputError: There is no tokenizer, or it has no chat template.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        except Exception as err:  # transformers raises what its parts raise
            raise InputError(f"{model!r} has no tokenizer that can be loaded: {err}") from err
        if not self._tokenizer.chat_template:
            raise InputError(
                f"the tokenizer of {model!r} has no chat template, so conversations cannot be written as the "
                "model saw them in its training"
            )
        self._ends = {self._tokenizer.eos_token_id} - {None}

    def tokenize(self, chat: Chat) -> TokenizedChat | str:
        """Token ids up to the end of the last answer, with its spans; or the reason why that cannot be.

        An answer begins where the template ends with the question and the cue for the assistant, and ends
        with its end-of-turn token. Templates that write an earlier turn differently once there is a later one
        (by dropping its reasoning, say) have no such place: the conversation is left out then.
        """
        messages = list(chat.messages)
        whole = self._apply(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._apply(messages[:number], add_generation_prompt=True) if number else []
            after = self._apply(messages[: number + 1])
            if whole[: len(before)] != before or whole[: len(after)] != after or len(after) <= len(before):
                return "the chat template changes earlier turns"
            stop = len(after)
            ends = [i for i in range(len(before), stop) if whole[i] in self._ends]
            if ends:
                stop = ends[-1] + 1  # what the template writes behind it is not sampled
            spans.append((max(len(before), 1), stop))
        return TokenizedChat(chat.id, whole[: spans[-1][1]], spans)

    def _apply(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
