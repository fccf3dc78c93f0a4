"""Text from a tokenizer's files alone: fast ones and tiktoken ones, and never their code."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import make_tokenizer

from specdec_tap.cli import main
from specdec_tap.detokenize import load_decoder, visible
from specdec_tap.errors import InputError
from specdec_tap.shards import BlockRef, Piece, RecordMeta, ShardHeader, ShardWriter, Span, TargetInfo
from specdec_tap.shards.codec import encode_block

WORDS = [b"Hello", b", w", "\u00f6rld".encode(), b"\xe6\x97", b"\xa5!", b"\x1b[31m"]


def make_tiktoken(folder: Path, *, code: str | None = None) -> Path:
    """A made-up tokenizer: the 256 bytes, a few longer pieces, two special tokens, as Kimi's files are."""
    folder.mkdir(exist_ok=True)
    pieces = [bytes([i]) for i in range(256)] + WORDS
    lines = [base64.b64encode(piece) + b" %d" % rank for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {
        "300": {"content": "[BOS]", "special": True, "lstrip": False},
        "301": {"content": "<|im_end|>", "special": True, "lstrip": False},
    }
    config = {"added_tokens_decoder": added, "tokenizer_class": "TikTokenTokenizer"}
    if code is not None:
        config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
        (folder / "tokenization_kimi.py").write_text(code)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tiktoken_pieces_are_joined_as_bytes(tmp_path: Path) -> None:
    decode = load_decoder(make_tiktoken(tmp_path))
    assert decode([300, 256, 257, 258, 301]) == "[BOS]Hello, w\u00f6rld<|im_end|>"
    assert decode([259, 260]) == "\u65e5!"  # one character of two tokens
    assert decode([]) == ""


def test_pieces_that_are_no_whole_character_and_unknown_ids_are_shown(tmp_path: Path) -> None:
    decode = load_decoder(make_tiktoken(tmp_path))
    assert decode([259, 256]) == "\ufffdHello"
    assert decode([299, 1_000_000]) == "<|299|><|1000000|>"


def test_a_tiktoken_file_decodes_as_the_library_does(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import load_tiktoken_bpe

    make_tiktoken(tmp_path)
    ranks = load_tiktoken_bpe(str(tmp_path / "tiktoken.model"))
    library = tiktoken.Encoding("made-up", pat_str=r".", mergeable_ranks=ranks, special_tokens={"[BOS]": 300})
    rng = np.random.default_rng(0)
    decode = load_decoder(tmp_path)
    for _ in range(50):
        ids = [300, *rng.integers(0, len(ranks), 40).tolist()]
        assert decode(ids) == library.decode(ids, errors="replace")


def test_code_beside_the_tokenizer_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    make_tiktoken(tmp_path / "t", code=f"open({str(trap)!r}, 'w')\nclass TikTokenTokenizer: pass\n")
    assert load_decoder(tmp_path / "t")([256]) == "Hello"
    assert not trap.exists()


def test_a_fast_tokenizer_wins_over_a_tiktoken_file(tmp_path: Path) -> None:
    make_tiktoken(tmp_path)
    make_tokenizer(tmp_path)
    decode = load_decoder(tmp_path)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>na\u00efve \u65e5<|im_end|>"
    assert decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tiktoken.model", b"SGVsbG8= 0\nnot base64 at all\n", r"line 2: .*is not 'BASE64 ID'"),
        ("tiktoken.model", b"SGVsbG8= 99999999999\n", "expected ids below"),
        ("tiktoken.model", b"SGVsbG8= -1\n", "expected ids below"),
        ("tiktoken.model", b"\n\n", "holds no token"),
        ("tiktoken.model", bytes(range(256)), "is not 'BASE64 ID'"),
        ("tokenizer.json", b"{}", "is no tokenizer"),
        ("other.txt", b"", "no tokenizer.json or tiktoken.model in"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        load_decoder(tmp_path)


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    make_tiktoken(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}')
    with pytest.raises(InputError, match=r"tokenizer_config.json.*is not a table of ids and tokens"):
        load_decoder(tmp_path)


def test_nothing_that_a_terminal_acts_on_is_left() -> None:
    assert visible("a\x1b[31m\u202eb\n\x07") == "a\\x1b[31m\\u202eb\n\\x07"


def test_shards_show_prints_coloured_text_of_a_tiktoken_model(tmp_path: Path, capsys, monkeypatch) -> None:
    """Prompt dim, response green, positions without states on red; escapes in the text are spelled out."""
    info = TargetInfo(
        name="kimi", revision=None, architecture="DeepseekV3ForCausalLM", model_type="kimi_k2",
        num_hidden_layers=8, hidden_size=16, vocab_size=320, config_sha256="c" * 64, tokenizer_sha256=None,
        quantization=None,
    )  # fmt: skip
    header = ShardHeader(stream="s0", shard=0, created_unix_s=0.0, target=info, aux_layer_ids=(2, 4, 5),
                         engine={"vllm": "0.32.0"})  # fmt: skip
    ids = np.array([300, 256, 257, 258, 261, 256, 301], np.int32)
    rows = np.full((4, 16), 0x3F80, np.uint16)
    with ShardWriter(tmp_path, header) as writer:
        payload = encode_block(header, position=2, aux=np.stack([rows] * 3), final=rows[2:], final_row=2)
        piece = Piece(2, BlockRef(*writer.append_block(payload)), 0, 4)
        meta = RecordMeta(
            request_id="r\x1b[0m1", token_ids=ids, spans=(Span(0, 4, "prompt"), Span(4, 7, "response")),
            pieces=(piece,), finish_reason="stop", started_unix_s=0.0, finished_unix_s=1.0, sampling={},
        )  # fmt: skip
        writer.append_record(dataclasses.replace(meta))
    make_tiktoken(tmp_path / "target")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["shards", "show", str(tmp_path), "0"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2;41m[BOS]Hello" in out  # positions 0 and 1 have no states
    assert "\x1b[2m, w\u00f6rld" in out
    assert "\x1b[32m\\x1b[31mHello<|im_end|>" in out
    assert "r\\x1b[0m1" in out
    assert "s0/000001" in out
