"""``specdec-tap extract`` with Hugging Face code; the vLLM side and their equality are in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.families import edit_config, make_unsupported
from helpers.tiny import make_llama

from specdec_tap import extract
from specdec_tap.cli import main
from specdec_tap.conversations import ChatTokenizer, parse_chat, read_chats
from specdec_tap.errors import InputError, SpecdecTapError
from specdec_tap.shards import open_shards
from specdec_tap.shards.interchange.common import apply_norm
from specdec_tap.shards.layout import MAX_REQUEST_ID_CHARS
from specdec_tap.target import load_target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHATS = [
    [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Hi there!"),
        ("user", "Bye"),
        ("assistant", "Bye!"),
    ],
    [("user", "What is one and one?"), ("assistant", "Two, as far as I know. " * 4), ("user", "Sure?")],
]


def row(name: object, messages: list[tuple[str, str]]) -> dict:
    return {"id": name, "messages": [{"role": r, "content": c} for r, c in messages]}


def write_chats(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("extract") / "model", hidden_size=32, tied=False)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl", [row(f"c{i}", chat) for i, chat in enumerate(CHATS)])


def test_records_hold_the_models_states_and_the_answers_spans(model, chats, tmp_path, capsys) -> None:
    shards = tmp_path / "shards"
    assert main(["extract", str(model), str(chats), "--backend", "hf", "--out", str(shards)]) == 0
    assert "2 conversations" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    with open_shards(shards) as store:
        assert store.header.aux_layer_ids == (2, 4, 5) and store.header.dtype == "bfloat16"
        first, second = store
        texts = [
            tokenizer.decode(first.token_ids[s.start : s.stop]) for s in first.spans if s.kind == "response"
        ]
        assert texts == ["Hi there!<|im_end|>", "Bye!<|im_end|>"]
        assert second.spans[-1].kind == "response" and second.spans[-1].stop == second.num_tokens
        for record in store:
            with torch.inference_mode():
                ids = torch.from_numpy(record.token_ids[:-1].astype(np.int64))[None]
                out = loaded.model(ids, output_hidden_states=True, use_cache=False)
            for slot, layer in enumerate((2, 4, 5)):
                assert torch.equal(record.aux_torch()[:, slot], out.hidden_states[layer][0])
            start, stop = record.final_span[0]
            assert start == next(s.start for s in record.spans if s.kind == "response") - 1
            assert torch.equal(record.final_torch(start, stop), out.last_hidden_state[0, start:stop])
    assert main(["shards", "verify", str(shards), "--reference", str(model)]) == 0


class Seen(list):
    """What went into a module, one tensor a call."""

    def __init__(self, module) -> None:
        super().__init__()
        module.register_forward_pre_hook(lambda _, args: self.append(args[0][0]))


def make_refused(folder: Path, kind: str, **changes: object) -> Path:
    """A tiny random model of a family that vLLM's tap refuses, with norms that change what they get."""
    make_unsupported(folder, kind)
    edit_config(folder, **changes)
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.3)
    loaded.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "norm", "changes"),
    [
        ("gpt2", "transformer.ln_f", {}),
        ("opt", "model.decoder.final_layer_norm", {}),
        ("opt", None, {"do_layer_norm_before": False}),
    ],
)
def test_models_that_the_tap_refuses_are_captured_in_hugging_face_code(
    kind, norm, changes, chats, tmp_path, capsys
) -> None:
    """Aux rows are ``output_hidden_states``, the last id the norm's input, final states the head's."""
    model, shards = make_refused(tmp_path / "model", kind, **changes), tmp_path / "shards"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    command = ["extract", str(model), str(chats), "--backend", "hf", "--out", str(shards)]
    layers = (1, 2, 3, 4)
    if norm is None:  # its head sees the last layer's output as it is
        layers = (1, 2, 3)
        assert main([*command, "--final-hidden", "all", "--layers", "1,2,4"]) == 2
        assert "gives no state for [4]" in capsys.readouterr().err
        command[-1] = str(shards := tmp_path / "again")
    ids = ",".join(map(str, layers))
    assert main([*command, "--final-hidden", "all", "--layers", ids]) == 0
    head = Seen(loaded.get_output_embeddings())
    entering = Seen(loaded.get_submodule(norm)) if norm else []
    with open_shards(shards) as store:
        assert store.header.aux_layer_ids == layers and store.header.dtype == "float32"
        assert len(store) == 2
        for record in store:
            with torch.inference_mode():
                tokens = torch.from_numpy(record.token_ids[:-1].astype(np.int64))[None]
                out = loaded(tokens, output_hidden_states=True, use_cache=False)
            truth = [out.hidden_states[i][0] for i in layers if i < 4] + entering[-1:]
            for slot, states in enumerate(truth):
                assert torch.equal(record.aux_torch()[:, slot], states)
            assert torch.equal(record.final_torch(0, record.num_rows), head[-1])
            if norm:
                assert not torch.allclose(head[-1], entering[-1], rtol=0.1)
    # The saved target's head and norm are the model's.
    target = load_target(shards / "target")
    weight = torch.from_numpy(target.head.float32()[: loaded.config.vocab_size])
    assert torch.allclose(head[-1] @ weight.T, out.logits[0], atol=1e-3)
    if norm:
        again = apply_norm(entering[-1].numpy(), target)
        assert np.allclose(again, head[-1].numpy(), atol=1e-4)
    assert main(["shards", "verify", str(shards), "--reference", str(model)]) == 0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {}, "no causal language model"),
        ("bert", {"is_decoder": True}, "its head sees other states"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32 and hidden_size 64"),
    ],
)
def test_models_whose_states_a_drafter_cannot_use_are_refused(
    kind, changes, message, chats, tmp_path, capsys
) -> None:
    model = make_refused(tmp_path / "model", kind, **changes)
    assert main(["extract", str(model), str(chats), "--backend", "hf", "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("0*"))


def test_resuming_adds_what_is_missing_and_nothing_twice(model, chats, tmp_path, capsys) -> None:
    shards = str(tmp_path / "shards")
    command = ["extract", str(model), str(chats), "--backend", "hf", "--out", shards]
    assert main([*command, "--limit", "1"]) == 0
    assert main(command) == 2
    assert "holds 1 records already; pass --resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "done before": 1, "records": 1, "tokens": 132, "response tokens": 93,
    }  # fmt: skip
    with open_shards(shards) as store:
        assert [r.meta.request_id for r in store] == ["c0", "c1"]


def test_nothing_left_to_do_starts_no_engine(model, chats, tmp_path, capsys, monkeypatch) -> None:
    command = ["extract", str(model), str(chats), "--out", str(tmp_path / "shards")]
    assert main([*command, "--backend", "hf"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(extract, "_Offline", None)  # cannot be started
    assert main([*command, "--backend", "vllm", "--resume", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"done before": 2}


def test_a_server_that_captures_into_the_same_folder_is_left_alone(model, chats, tmp_path) -> None:
    root = tmp_path / "shards"
    (root / "other").mkdir(parents=True)
    (root / "other" / "000001.open").touch()
    before = extract._streams(root)
    assert main(["extract", str(model), str(chats), "--backend", "hf", "--out", str(root), "--resume"]) == 0
    extract.wait_until_sealed(root, before, timeout_s=0.0)
    with pytest.raises(SpecdecTapError, match="is still open"):
        extract.wait_until_sealed(root, timeout_s=0.0)
    assert extract._sums(root, before)["records"] == 2
    assert extract._sums(root, extract._streams(root))["records"] == 0


def test_answers_of_replay_are_conversations(tmp_path: Path) -> None:
    line = {"id": "a", "turns": ["One?", "Two?", "Three?"], "answers": ["1", "2"], "outcome": "too_long"}
    (chat,) = read_chats(write_chats(tmp_path / "answers.jsonl", [line]))
    assert [m["content"] for m in chat.messages] == ["One?", "1", "Two?", "2"]


def test_what_cannot_be_extracted_is_counted(model, tmp_path, capsys) -> None:
    long = row("long", [("user", "x"), ("assistant", "y" * 500)])
    path = write_chats(tmp_path / "c.jsonl", [long, row("short", CHATS[0])])
    command = ["extract", str(model), str(path), "--backend", "hf", "--out", str(tmp_path / "s")]
    assert main([*command, "--max-length", "300", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["left out: longer than 300 tokens"] == 1


def test_a_template_that_rewrites_earlier_turns_leaves_the_conversation_out(model) -> None:
    tokenizer = ChatTokenizer(str(model))
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] if loop.last else 'cut' }}|{% endfor %}"
    )
    assert tokenizer.tokenize(parse_chat(row("a", CHATS[0]))) == "the chat template changes earlier turns"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 1: is not JSON"),
        ("[1]", "is a JSON list"),
        ('{"id": "a"}', "'messages' is missing or empty"),
        ('{"messages": []}', "'id' is missing"),
        ('{"id": 1, "messages": [{"role": "user", "content": "x"}]}', "holds no message of the assistant"),
        ('{"id": 1, "messages": [{"role": "boss", "content": "x"}]}', "without a role of system"),
        ('{"id": 1, "messages": [{"role": "assistant", "content": [1]}]}', "without text as its content"),
    ],
)
def test_bad_lines_are_named_before_the_model_is_loaded(line: str, message: str, tmp_path, capsys) -> None:
    (tmp_path / "c.jsonl").write_text(line + "\n")
    assert main(["extract", "no-model", str(tmp_path / "c.jsonl"), "--out", str(tmp_path / "s")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_long_id_is_cut_so_that_it_is_known_again_in_the_shards() -> None:
    chat = parse_chat(row("x" * 300 + "7", CHATS[0]))
    assert chat.id.endswith("x7") and len(chat.id) + len("-01234567") <= MAX_REQUEST_ID_CHARS


def test_an_id_twice_is_named(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [row("a", CHATS[0]), row("a", CHATS[1])])
    with pytest.raises(InputError, match=r"line 2: has the id 'a' of an earlier line"):
        list(read_chats(path))


def test_wrong_use_is_said(model, chats, tmp_path, capsys) -> None:
    out = str(tmp_path / "s")
    for flags, message in (
        (["org/name", str(chats), "--backend", "hf"], "is not a folder; --backend hf expects"),
        ([str(model), str(chats), "--backend", "hf", "--layers", "2,99"], "expected ids from 1 to 8"),
        ([str(model), str(tmp_path / "none.jsonl")], "cannot be read"),
        (
            [str(model), str(chats), "--backend", "hf", "--engine", '{"a": 1}'],
            "has no effect with --backend hf",
        ),
    ):
        assert main(["extract", *flags, "--out", out]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"), [("{", "'{' is not JSON"), ("[1]", "no JSON object of arguments of vllm.LLM")]
)
def test_engine_arguments_that_are_no_object_are_said(text, message, chats, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["extract", "m", str(chats), "--out", str(tmp_path / "s"), "--engine", text])
    assert message in capsys.readouterr().err


def test_a_tokenizer_without_a_template_is_named(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m", hidden_size=32)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="has no chat template"):
        ChatTokenizer(str(folder))
