"""A folder of captured conversations and one of training runs, made by the real code, for a browser to show.

The states follow a rule that a drafter can learn in seconds, so the pages show right and wrong drafts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from helpers.serverkit import EVALUATION, make_header, put, write_status
from specdec_tap.shards import RecordMeta, ShardWriter

HIDDEN = 32
VOCAB = 420
STREAM = "gpu-7-0"
HOSTILE = (
    "Show me <b>bold</b>, <script>alert('script ran')</script> and <img src=x onerror=\"alert('image ran')\">"
)
ANSI = "In a terminal \x1b[31mred\x1b[0m looks red; \u202eturned around\u202c it is not. </div></main> End."
TOPICS = (
    "a queue",
    "a linked list",
    "binary search",
    "a hash map",
    "quick sort",
    "a trie",
    "a heap",
    "memoization",
)
QUESTIONS = (
    "Explain {} to a colleague.",
    "Write a short test for {} in Python.",
    "What can go wrong with {}?",
)
ANSWERS = (
    "Think of {0} as a small promise: what goes in comes out again, in an order that you can name. The "
    "rest of {0} is bookkeeping, and most mistakes are in the bookkeeping: the first element, the last one, "
    "and none.",
    "def test_{1}():\n    items = make([3, 1, 2])\n    assert items.first() == 1\n"
    "    assert items.last() == 3\n    assert make([]).is_empty()\n",
    "Three things go wrong with {0}. First, the empty case. Second, the case with one element. Third, "
    "somebody changes it while somebody else is reading it, and then the order that you can name is gone.",
)  # fmt: skip


def system_text(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def conversations() -> list[tuple[str, str]]:
    """Prompts and answers, 24 ordinary ones and one that attacks whoever shows it."""
    out = []
    for topic in TOPICS:
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
            name = topic.removeprefix("a ").replace(" ", "_")
            out.append((system_text(question.format(topic)), answer.format(topic, name) + "<|im_end|>"))
    out.append((system_text(HOSTILE), ANSI + "<|im_end|>"))
    return out


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of a few hundred tokens, trained on the conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    tokenizer.train_from_iterator([prompt + answer for prompt, answer in conversations()], trainer)
    return tokenizer


def normed(rows: np.ndarray) -> np.ndarray:
    """Rows with a root mean square of 1, as a final norm leaves them."""
    return (rows / np.sqrt((rows**2).mean(-1, keepdims=True))).astype(np.float32)


def make_checkpoint(folder: Path, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Save the tensors of a target that training reads, its config and its tokenizer; returns the tensors."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
        "lm_head.weight": normed(rng.standard_normal((VOCAB, HIDDEN))),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tensors


def make_shards(root: Path, checkpoint: Path) -> Path:
    """Store the conversations, one follow-up that shares its first turn, and one with a gap."""
    from specdec_tap.target import save_target

    tokenizer = make_tokenizer()
    tensors = make_checkpoint(checkpoint, tokenizer)
    root.mkdir(parents=True)
    save_target(checkpoint, root / "target")
    embed, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]

    def states(ids: np.ndarray, start: int, stop: int) -> np.ndarray:
        aux = embed[ids[start:stop]]
        final = head[ids[start + 1 : stop + 1]]
        return ((np.stack([aux, aux, aux, final]).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)

    def ids(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text).ids, np.int32)

    now = time.time() - 3600
    header = make_header(STREAM, name="tiny-llama", vocab_size=VOCAB, hidden_size=HIDDEN)
    with ShardWriter(root, header, min_free_bytes=0) as writer:

        def store(number: int, prompt: str | np.ndarray, answer: str, **how: object) -> RecordMeta:
            if isinstance(prompt, str):
                prompt = ids(prompt)
            name = f"chatcmpl-{number:04d}"
            return put(
                writer, prompt, ids(answer), started=now + number, request_id=name, states=states, **how
            )  # fmt: skip

        for number, (prompt, answer) in enumerate(conversations()):
            first = store(number, prompt, answer)
            if number == 11:
                writer.rotate()
        more = np.concatenate([first.token_ids, ids("\n" + system_text("Say that again, in plain words."))])
        store(90, more, "It is a list that remembers an order.<|im_end|>", reuse=(first, 64))
        prompt, answer = conversations()[3]
        store(91, prompt, answer, gap=12)
    return root


def make_runs(root: Path, shards: Path) -> Path:
    """Train two small drafters with the real trainer and put evaluations beside them."""
    from specdec_trainer.config import TrainConfig
    from specdec_trainer.run import run

    for name, lr in (("first-try", 2e-3), ("higher-rate", 2e-2)):
        config = TrainConfig(
            epochs=10, batch_tokens=400, ttt_steps=4, held_out=0.25, dtype="float32", log_steps=1,
            lr=lr, warmup=0.0,
        )  # fmt: skip
        run(config, shards, out=root / name, tensorboard=False)
    for tokens in (1, 2, 3):
        acceptance = EVALUATION["acceptance_per_position"][:tokens]
        told = EVALUATION | {
            "acceptance_per_position": acceptance, "acceptance_length": 1 + sum(acceptance),
            "speedup": 1.1 + 0.07 * tokens, "output_tokens_per_s": 400 * (1.1 + 0.07 * tokens),
            "categories": {
                name: one | {"acceptance_per_position": one["acceptance_per_position"][:tokens]}
                for name, one in EVALUATION["categories"].items()
            },
        }  # fmt: skip
        (root / "higher-rate" / f"eval-k{tokens}.json").write_text(json.dumps(told))
    return root


def write_traffic(root: Path, seconds: int) -> None:
    """Write the status of a server that has captured for so long."""
    worker = {"requests_started": 40, "rows": 9_000, "steps": 50, "hook_ns": 2_000_000}
    writer = {
        "requests_sealed": 39, "tokens": 8_800, "response_tokens": 6_000, "rows_stored": 6_500,
        "rows_reused": 2_300, "stored_bytes": 6_300_000, "raw_bytes": 12_000_000, "steps_handled": 50,
    }  # fmt: skip
    write_status(
        root, "gpu-7-1",
        worker={name: value * seconds for name, value in worker.items()},
        writer={name: value * seconds for name, value in writer.items()},
        live_requests=31, ring_used_bytes=3_000_000 + 100_000 * (seconds % 7), disk_free_bytes=75 * 10**9,
        min_free_bytes=5 * 10**9, max_bytes=None, sample_rate=1.0, server_id="one",
    )  # fmt: skip
