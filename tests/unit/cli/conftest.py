"""A small OpenAI-compatible server on loopback, for tests of the client side."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import PlainTextResponse

CONTEXT_WORDS = 50


@dataclass
class StandIn:
    """Answers each chat request with ``echo: <last user turn>``; counts what it sees."""

    url: str = ""
    model: str = "stand-in"
    bodies: list[dict] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    """HTTP status codes that the next requests are answered with, before any is answered well."""
    delay_s: float = 0.0
    under_way: int = 0
    most_under_way: int = 0
    accepted: tuple[int, ...] = ()
    """Accepted draft tokens per position that each answered request adds, over 10 drafts."""
    answered: int = 1000
    """Requests counted so far: a server that has run for a while does not start at zero."""

    def metrics_page(self) -> str:
        """Two engines share the counts, as with data parallelism; other metrics are around them."""
        lines = ["# HELP vllm:num_requests_running Requests.", 'vllm:num_requests_running{engine="0"} 0.0']
        if self.accepted:
            counts = {
                "drafts": 10,
                "draft_tokens": 10 * len(self.accepted),
                "accepted_tokens": sum(self.accepted),
            }
            for engine, share in (("0", self.answered // 2), ("1", self.answered - self.answered // 2)):
                lines += [
                    f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="m"}} {count * share}.0'
                    for name, count in counts.items()
                ]
                lines += [
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="{i}"}} '
                    f"{count * share}.0"
                    for i, count in enumerate(self.accepted)
                ]
        return "\n".join(lines) + "\n"

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> dict:
            return {"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": 4096}]}

        @app.get("/metrics")
        def metrics() -> PlainTextResponse:
            return PlainTextResponse(self.metrics_page())

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> JSONResponse:
            body = await request.json()
            self.bodies.append(body)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                await asyncio.sleep(self.delay_s)
            finally:
                self.under_way -= 1
            if self.failures:
                status = self.failures.pop(0)
                return JSONResponse({"error": {"message": f"made to fail with {status}"}}, status)
            words = sum(len(message["content"].split()) for message in body["messages"])
            if words > CONTEXT_WORDS:
                message = f"This model's maximum context length is {CONTEXT_WORDS} tokens, not {words}."
                return JSONResponse({"error": {"message": message, "type": "BadRequestError"}}, 400)
            self.answered += 1
            text = "echo: " + body["messages"][-1]["content"]
            return JSONResponse(
                {
                    "id": "chatcmpl-1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": text},
                            "finish_reason": "stop",
                        }
                    ],
                    "usage": {"prompt_tokens": words, "completion_tokens": 3, "total_tokens": words + 3},
                }
            )

        return app


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A running stand-in server; its ``url`` ends in /v1."""
    server_side = StandIn()
    listener = socket.create_server(("127.0.0.1", 0))
    server_side.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server = uvicorn.Server(uvicorn.Config(server_side.app(), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield server_side
    server.should_exit = True
    thread.join(timeout=10)
    listener.close()


@pytest.fixture
def unused_url() -> Iterator[str]:
    """The address of a port that is reserved but never answers with HTTP: connecting is refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, not listening
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
