"""A sequence of 32k rows trains in bounded memory: nothing of size rows x rows or rows x vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, resource, sys
sys.path[:0] = {paths!r}
import numpy as np, torch
from specdec_trainer.batch import pack
from specdec_trainer.objective import Eagle3Objective
from trainer_fakes import make_document, make_parts

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.set_num_threads(1)
vocab, hidden, supervised = 8192, 32, 3072
parts = make_parts(dtype=torch.float32, vocab_size=vocab, draft_vocab_size=vocab, hidden_size=hidden,
                   intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
                   max_position_embeddings=32768)
parts.model.lm_head.weight.requires_grad_(False)
objective = Eagle3Objective(parts.model, parts.teacher, steps=2)
parts.model.train()

def step(rows):
    document = make_document(np.random.default_rng(0), rows, list(range(rows - min(rows, supervised), rows)),
                             hidden=hidden, vocab=vocab, dtype=torch.bfloat16)
    sums = objective.loss(pack([document]))
    sums.total.backward()
    return int(sums.count[0])

step(512)
before = peak()
count = step(32768)
print(json.dumps({{"grown_mb": peak() - before, "supervised": count}}))
"""


def test_32k_rows_train_in_bounded_memory() -> None:
    """3,072 answers at the end of 32,768 rows: their scores alone would take 800 MB for each draft step, a
    mask of the sequence 1 GB, logits 100 MB."""
    code = SCRIPT.format(paths=[str(Path(__file__).parent)])
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert found["supervised"] == 3072
    assert found["grown_mb"] < 200, found
