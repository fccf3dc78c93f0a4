"""Keep the hidden states a vLLM server already computes, and train a drafter from them."""

from ._version import __version__

__all__ = ["__version__", "open_shards"]


def __getattr__(name: str) -> object:
    if name == "open_shards":
        from .shards import open_shards

        return open_shards
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
