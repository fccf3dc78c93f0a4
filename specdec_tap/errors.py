"""The exceptions that specdec-tap raises on purpose.

::

    SpecdecTapError
      ConfigError               a setting is wrong (also a ValueError); names the setting
      UnsupportedVllmError      a vLLM version or a model that the tap cannot attach to
      ShardError                carries ``path`` and, where known, ``offset``
        UnsupportedFormatError    newer or unknown format version, or a foreign file
        CorruptShardError         checksum, length or invariant violated
        IncompleteShardError      the writer died before sealing: recoverable
        ShardWriteError           the disk is full or failed (also an OSError); the journal stays valid
        StreamBusyError           another writer is alive in the stream's folder
      IncompatibleShardsError   shards of one run disagree on the target or the layers
      InputError                an input file, folder or server is not what was expected
"""

from __future__ import annotations

from pathlib import Path


class SpecdecTapError(Exception):
    """Base class: the message alone tells a user what to do."""


class ConfigError(SpecdecTapError, ValueError):
    """A setting is wrong."""


class UnsupportedVllmError(SpecdecTapError):
    """The tap cannot attach to this vLLM or this model."""


class InputError(SpecdecTapError):
    """An input file, folder or server is not what was expected."""


class ShardError(SpecdecTapError):
    """Something is wrong with one shard file."""

    def __init__(self, message: str, *, path: Path | str | None = None, offset: int | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else Path(path)
        self.offset = offset


class UnsupportedFormatError(ShardError):
    """Not a shard, or a shard of a format version this reader does not know."""


class CorruptShardError(ShardError):
    """A checksum, a length or an invariant is violated."""


class IncompleteShardError(ShardError):
    """The writer died before sealing; whole frames can still be read."""


class ShardWriteError(ShardError, OSError):
    """Writing failed; what was acknowledged before is safe and the journal is valid."""

    def __init__(
        self,
        message: str,
        *,
        path: Path | str | None = None,
        offset: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, offset=offset)
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0])


class StreamBusyError(ShardError):
    """Another writer is alive in the stream's folder."""


class IncompatibleShardsError(SpecdecTapError):
    """Shards of one run come from different targets or layers."""
