"""Steps as vLLM's two model runners leave them, without vLLM: for unit tests and the hook benchmark."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace as Object

import numpy as np
import torch

from specdec_tap.capture.ring import CONTROL_BYTES, Ring
from specdec_tap.config import TapConfig
from specdec_tap.shards.layout import ShardHeader, TargetInfo
from specdec_tap.vllm_plugin import runner_v1, runner_v2
from specdec_tap.vllm_plugin.tap import Limits, Tap

NUM_AUX = 3


def make_header(hidden_size: int, dtype: str = "bfloat16", **engine: str | int) -> ShardHeader:
    return ShardHeader(
        stream="starting",
        shard=0,
        created_unix_s=0.0,
        target=TargetInfo(
            name="fake", revision=None, architecture="FakeForCausalLM", model_type="fake",
            num_hidden_layers=8, hidden_size=hidden_size, vocab_size=1000, config_sha256="0" * 64,
            tokenizer_sha256=None, quantization=None,
        ),
        aux_layer_ids=(2, 4, 5),
        dtype=dtype,
        engine={"vllm": "fake", "dp_rank": 0, **engine},
    )  # fmt: skip


def make_tap(folder: Path, *, hidden_size: int = 16, limits: dict | None = None, **settings: object) -> Tap:
    """A real tap with its real writer process."""
    defaults = {
        "max_rows": 512, "max_requests": 256, "max_columns": 1, "max_model_len": 4096,
        "cache_tokens": lambda: 1 << 16, "cache_block_tokens": 16,
    }  # fmt: skip
    config = TapConfig(dir=folder, min_free_bytes=0, **settings)
    return Tap(config, make_header(hidden_size), Limits(**defaults | (limits or {})), torch.device("cpu"))


def new_request(req_id: str, prompt: list[int], **fields: object) -> Object:
    """What the scheduler says of a new request (``NewRequestData``)."""
    params = Object(
        extra_args=fields.pop("extra_args", None), stop_token_ids=fields.pop("stop_token_ids", []),
        eos_token_id=fields.pop("eos_token_id", None), max_tokens=fields.pop("max_tokens", 100),
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None,
    )  # fmt: skip
    base = {"mm_features": [], "prompt_embeds": None, "lora_request": None, "sampling_params": params}
    return Object(req_id=req_id, prompt_token_ids=prompt, **base | fields)


def schedule(new: list | None = None, finished: list[str] | None = None) -> Object:
    """The parts of a ``SchedulerOutput`` that the tap reads."""
    return Object(scheduled_new_reqs=new or [], finished_req_ids=set(finished or []))


class FakeRunner:
    """Holds the state of one step as runner ``v1`` or ``v2`` would; ``run`` gives it to a tap.

    Args:
        name: ``v1`` or ``v2``.
        hidden_size: Width of the states.
        dtype: Of the states.
        padding: Rows of NaN behind the last row, as a graph's bucket leaves them.
    """

    def __init__(
        self, name: str, hidden_size: int, dtype: torch.dtype = torch.bfloat16, padding: int = 5
    ) -> None:
        self.name, self.hidden_size, self.dtype, self.padding = name, hidden_size, dtype, padding

    def step(
        self, req_ids: list[str], counts: list[int], firsts: list[int], tokens: list[int],
        sampled: list[list[int]], states: torch.Tensor | None = None, unfinished: list[bool] | None = None,
    ) -> functools.partial:  # fmt: skip
        """Return what the runner's hook passes on.

        Args:
            req_ids: Batch order.
            counts: Rows of each request.
            firsts: Position of each request's first row.
            tokens: The tokens that were fed, all rows.
            sampled: Sampled ids of each request.
            states: ``[NUM_AUX + 1, rows, H]``; random ones by default.
            unfinished: Prefill chunks that are not the last one.
        """
        rows = sum(counts)
        if states is None:
            states = torch.randn(NUM_AUX + 1, rows, self.hidden_size, dtype=torch.float32).to(self.dtype)
        pad = torch.full((NUM_AUX + 1, self.padding, self.hidden_size), float("nan"), dtype=self.dtype)
        layers = list(torch.cat([states, pad], dim=1))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ranges = [np.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)]
        positions = torch.from_numpy(np.concatenate([*ranges, np.full(self.padding, -1)]).astype(np.int64))
        input_ids = torch.tensor([*tokens, *[0] * self.padding], dtype=torch.int32)
        columns = max(map(len, sampled))
        ids = torch.tensor([[*row, *[-1] * (columns - len(row))] for row in sampled])
        flags = np.array(unfinished or [False] * len(req_ids))
        aux, final = layers[:-1], layers[-1]
        slots = tuple(range(NUM_AUX))
        if self.name == "v1":
            runner = Object(
                input_batch=Object(req_ids=req_ids, num_reqs=len(req_ids)),
                query_start_loc=Object(np=np.concatenate([starts, starts[-1:]])),
                positions=positions,
                input_ids=Object(gpu=input_ids),
                discard_request_mask=Object(np=flags),
            )
            state = Object(aux_hidden_states=aux, hidden_states=final)
            return functools.partial(runner_v1._step, runner, state, slots, Object(sampled_token_ids=ids))
        batch = Object(
            req_ids=req_ids,
            num_reqs=len(req_ids),
            query_start_loc_np=starts,
            positions=positions,
            input_ids=input_ids,
        )
        state = Object(aux_hidden_states=aux, hidden_states=final, input_batch=batch)
        num_sampled = torch.tensor(
            [0 if flag else len(row) for flag, row in zip(flags, sampled, strict=True)], dtype=torch.int32
        )
        result = (Object(sampled_token_ids=ids), num_sampled, None)
        return functools.partial(runner_v2._step, None, state, slots, result)


def ring_tensor(ring: Ring) -> torch.Tensor:
    return torch.frombuffer(ring.buffer, dtype=torch.uint8)[CONTROL_BYTES:]
