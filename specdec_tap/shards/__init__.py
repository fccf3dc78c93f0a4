"""The shard format: layout, codec, writer, reader. NumPy and zstd only; torch on request."""

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
    "open_shards",
    "stitch",
]
