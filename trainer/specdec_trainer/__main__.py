"""``python -m specdec_trainer SHARDS``: what ``specdec-tap train`` runs; torchrun starts this module."""

from __future__ import annotations

import sys

from specdec_tap.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
