"""The shard format: layout, codec, writer, reader. NumPy and zstd only; torch on request."""

from __future__ import annotations

import importlib
from typing import Any

from .codec import Block, decode_block, encode_block
from .frames import Totals
from .layout import BlockRef, Piece, RecordMeta, ShardHeader, Span, TargetInfo
from .reader import Problem, Record, ShardInfo, ShardStore, open_shards
from .stitch import Stitched, stitch
from .writer import ShardWriter

__all__ = [
    "Block",
    "BlockRef",
    "Piece",
    "Problem",
    "Record",
    "RecordMeta",
    "ShardDataset",
    "ShardHeader",
    "ShardInfo",
    "ShardStore",
    "ShardWriter",
    "Span",
    "Stitched",
    "TargetInfo",
    "Totals",
    "decode_block",
    "encode_block",
    "hf_dataset",
    "open_shards",
    "pad_samples",
    "stitch",
]

# Names whose modules import torch, or ask for an optional package.
_LAZY = {"ShardDataset": "torch_dataset", "pad_samples": "torch_dataset", "hf_dataset": "huggingface"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
