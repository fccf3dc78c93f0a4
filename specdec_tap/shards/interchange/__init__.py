"""Hidden states from and for the neighbours' tools, one module a format.

Each module has ``read(path) -> Iterator[Sample]`` and, where the other side has a reader, ``write``. What
their formats leave unsaid (which layers, before or after the last norm) is asked for, converted and
checked here; ``FORMATS`` says what each one means by default.
"""

from __future__ import annotations

from .common import FORMATS, Sample, export_shards, import_dump

__all__ = ["FORMATS", "Sample", "export_shards", "import_dump"]
