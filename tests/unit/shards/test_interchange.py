"""Dumps of the neighbours come in with their meaning, and go out so that they come in again."""

from __future__ import annotations

import dataclasses
import gzip
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from shardkit import make_header, write_request

from specdec_tap.cli import main
from specdec_tap.errors import InputError
from specdec_tap.shards import ShardWriter, Span, open_shards
from specdec_tap.shards.interchange import export_shards, import_dump
from specdec_tap.shards.verify import verify_shards

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS, HIDDEN, VOCAB, T = 8, 32, 120, 50


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(directory, token ids, residual states r_0 .. r_N, post-norm final state) of a tiny model with real
    norms."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.3, 2.0)
    path = tmp_path_factory.mktemp("interchange") / "model"
    model.save_pretrained(path)
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    ids = torch.randint(0, VOCAB, (T,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        out = model.model(ids[None], output_hidden_states=True)
    residual = [h[0] for h in out.hidden_states[:-1]] + [before_norm[0][0]]
    return path, ids, residual, out.last_hidden_state[0]


MASK = torch.zeros(T, dtype=torch.int64)
MASK[20:35] = 1
MASK[40:] = 1


def dump_modelopt(folder: Path, llama, *, vllm=False):
    _, ids, r, final = llama
    aux = [2, LAYERS // 2, LAYERS - 3]
    data = {
        "input_ids": ids,
        "hidden_states": r[LAYERS] if vllm else final,
        "aux_hidden_states": torch.cat([r[i] for i in aux], dim=-1),
        "loss_mask": MASK,
        "conversation_id": "c1",
    }
    torch.save(data, folder / "c1.pt")


def dump_specforge(folder: Path, llama, *, zipped=False):
    _, ids, r, final = llama
    data = {
        "input_ids": ids,
        "loss_mask": MASK,
        "hidden_state": final[None],
        "aux_hidden_state": torch.cat([r[2], r[LAYERS // 2], r[LAYERS - 3]], dim=-1)[None],
    }
    rows = folder / "rows_0-2000"
    rows.mkdir()
    buffer = io.BytesIO()
    torch.save(data, buffer)
    name = rows / ("data_0.ckpt.gz" if zipped else "data_0.ckpt")
    name.write_bytes(gzip.compress(buffer.getvalue()) if zipped else buffer.getvalue())


def dump_connector(folder: Path, llama):
    from safetensors.torch import save_file

    _, ids, r, _ = llama
    states = torch.stack([r[2], r[LAYERS // 2], r[LAYERS - 3], r[LAYERS]], dim=1)
    save_file({"hidden_states": states.contiguous(), "token_ids": ids}, folder / "req-1.safetensors")


def dump_eagle(folder: Path, llama):
    _, ids, _, final = llama
    (folder / "0").mkdir()
    torch.save({"input_ids": ids, "hidden_state": final, "loss_mask": MASK}, folder / "0" / "data_0.ckpt")


DUMPS = {
    "modelopt": dump_modelopt,
    "modelopt-vllm": lambda folder, llama: dump_modelopt(folder, llama, vllm=True),
    "specforge": dump_specforge,
    "specforge gz": lambda folder, llama: dump_specforge(folder, llama, zipped=True),
    "vllm-connector": dump_connector,
    "eagle": dump_eagle,
}


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_becomes_shards_that_mean_the_same(tmp_path, llama, name):
    """Whatever the tool's layers and norm, the shard holds r_2, r_4, r_5 and the post-norm final state."""
    dump = tmp_path / "dump"
    dump.mkdir()
    DUMPS[name](dump, llama)
    path, ids, r, final = llama
    counts = import_dump(name.split()[0], dump, tmp_path / "shards", path)
    assert counts["records"] == 1 and counts["tokens"] == T
    with open_shards(tmp_path / "shards") as store:
        header, record = store.header, store[0]
        assert header.dtype == "float32" and header.final_hidden == "post_norm"
        assert record.token_ids.tolist() == ids.tolist() and record.gaps == []
        if name == "eagle":
            assert header.aux_layer_ids == ()
        else:
            assert header.aux_layer_ids == (2, 4, 5)
            truth = torch.stack([r[i][:-1] for i in (2, 4, 5)], dim=1).numpy()
            assert np.array_equal(record.aux_float(), truth)
        if name == "vllm-connector":
            assert record.spans == (Span(0, 1, "prompt"), Span(1, T, "response"))
        else:
            assert [s for s in record.spans if s.kind == "response"] == [
                Span(20, 35, "response"),
                Span(40, T, "response"),
            ]
        for start, stop in record.final_span:
            assert np.allclose(record.final_float(start, stop), final[start:stop].numpy(), atol=2e-5)
        wanted = {t - 1 for s in record.spans if s.kind == "response" for t in range(s.start, s.stop)}
        assert wanted <= {t for a, b in record.final_span for t in range(a, b)}
    report = verify_shards(tmp_path / "shards", content_rows=0, reference=path)
    assert report.ok, report.findings


@pytest.mark.parametrize("name", ["modelopt", "modelopt-vllm", "specforge", "eagle"])
def test_an_export_comes_in_again_unchanged(tmp_path, llama, name):
    dump = tmp_path / "dump"
    dump.mkdir()
    dump_modelopt(dump, llama)
    path = llama[0]
    import_dump("modelopt", dump, tmp_path / "a", path)
    with open_shards(tmp_path / "a") as store:
        counts = export_shards(store, tmp_path / "out", name)
        first = store[0]
        assert counts["records"] == 1 and counts["tokens"] == T - 1
        import_dump(name, tmp_path / "out", tmp_path / "b", path)
        with open_shards(tmp_path / "b") as again:
            second = again[0]
            assert np.array_equal(second.token_ids, first.token_ids[:-1])
            if name != "eagle":
                assert np.array_equal(second.aux(), first.aux(0, T - 2))
            for start, stop in second.final_span:
                pair = second.final_float(start, stop), first.final_float(start, stop)
                assert np.allclose(*pair, atol=2e-5)
            assert [s.start for s in second.spans] == [s.start for s in first.spans]


def test_an_export_for_the_connector_has_its_layout(tmp_path, llama):
    """One file a request: states of four layers and the token ids, the last state before the norm."""
    from safetensors.numpy import load_file

    dump = tmp_path / "dump"
    dump.mkdir()
    dump_modelopt(dump, llama)
    import_dump("modelopt", dump, tmp_path / "a", llama[0])
    with open_shards(tmp_path / "a") as a:
        export_shards(a, tmp_path / "out", "vllm-connector")
        assert [p.name for p in (tmp_path / "out").rglob("*.safetensors")] == ["request-0.safetensors"]
        tensors = load_file(tmp_path / "out" / "request-0.safetensors")
        aux = a[0].aux_float(0, T - 2)
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert tensors["token_ids"].dtype == np.int64
    assert tensors["hidden_states"].shape == (T - 1, 4, aux.shape[-1])
    assert np.array_equal(tensors["token_ids"], llama[1].numpy()[: T - 1])
    assert np.array_equal(tensors["hidden_states"][: T - 2, :3], aux)
    import_dump("vllm-connector", tmp_path / "out", tmp_path / "b", llama[0])
    with open_shards(tmp_path / "a") as a, open_shards(tmp_path / "b") as b:
        assert np.array_equal(b[0].aux(), a[0].aux(0, T - 2))


def test_speculators_layout_round_trip(tmp_path, llama):
    pytest.importorskip("datasets")
    dump = tmp_path / "dump"
    dump.mkdir()
    dump_modelopt(dump, llama)
    import_dump("modelopt", dump, tmp_path / "a", llama[0])
    with open_shards(tmp_path / "a") as store:
        export_shards(store, tmp_path / "out", "speculators")
    import_dump("speculators", tmp_path / "out", tmp_path / "b", llama[0])
    with open_shards(tmp_path / "a") as a, open_shards(tmp_path / "b") as b:
        assert np.array_equal(b[0].aux(), a[0].aux(0, T - 2))
        assert [s.start for s in b[0].spans] == [s.start for s in a[0].spans]


def test_a_wrong_norm_claim_is_refused_with_what_was_measured(tmp_path, llama):
    dump_modelopt(tmp_path, llama, vllm=True)
    with pytest.raises(InputError, match="are pre_norm by their size, not post_norm"):
        import_dump("modelopt", tmp_path, tmp_path / "shards", llama[0], final_hidden="post_norm")


def test_explicit_layers_follow_the_tools_convention(tmp_path, llama):
    dump_modelopt(tmp_path, llama)
    import_dump("modelopt", tmp_path, tmp_path / "shards", llama[0], layer_ids=(1, 3, 4))
    with open_shards(tmp_path / "shards") as store:
        assert store.header.aux_layer_ids == (2, 4, 5)
    with pytest.raises(InputError, match="names 2 layers"):
        import_dump("modelopt", tmp_path, tmp_path / "x", llama[0], layer_ids=(1, 3))


class Malicious:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_nothing_in_a_pt_file_is_executed(tmp_path, llama):
    trap = tmp_path / "owned"
    (tmp_path / "dump").mkdir()
    with (tmp_path / "dump" / "evil.pt").open("wb") as file:
        pickle.dump({"input_ids": Malicious(trap)}, file, protocol=2)
    with pytest.raises(InputError, match=r"evil\.pt: cannot be loaded as plain tensors"):
        import_dump("modelopt", tmp_path / "dump", tmp_path / "shards", llama[0])
    assert not trap.exists()


def test_bombs_cuts_and_foreign_files_are_named(tmp_path, llama):
    rows = tmp_path / "rows_0-2000"
    rows.mkdir()
    (rows / "data_0.ckpt.gz").write_bytes(gzip.compress(bytes(64 << 20)))
    with pytest.raises(InputError, match=r"data_0\.ckpt\.gz: unpacks to more than"):
        import_dump("specforge", tmp_path, tmp_path / "shards", llama[0])
    (rows / "data_0.ckpt.gz").write_bytes(gzip.compress(np.random.default_rng(0).bytes(1000))[:500])
    with pytest.raises(InputError, match="is not a whole gzip file"):
        import_dump("specforge", tmp_path, tmp_path / "shards", llama[0])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no sample in"):
        import_dump("eagle", tmp_path / "empty", tmp_path / "shards", llama[0])
    assert not (tmp_path / "shards").exists()


def test_import_and_export_from_the_command_line(tmp_path, llama, capsys):
    (tmp_path / "dump").mkdir()
    dump_modelopt(tmp_path / "dump", llama)
    shards, out = str(tmp_path / "shards"), str(tmp_path / "out")
    command = [
        "shards",
        "import",
        shards,
        str(tmp_path / "dump"),
        "--from",
        "modelopt",
        "--target",
        str(llama[0]),
    ]
    assert main(command) == 0
    assert f"imported 1 records, {T} tokens" in capsys.readouterr().out
    assert main(["shards", "export", shards, out, "--to", "specforge"]) == 0
    assert main(["shards", "export", shards, out, "--to", "specforge"]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert main(["shards", "export", shards, out, "--to", "csv"]) == 2


def test_records_with_gaps_are_left_out_and_counted(tmp_path):
    with ShardWriter(tmp_path / "shards", make_header(final_scope="all")) as writer:
        meta, _, _ = write_request(writer, 70, 30)
        tokens = meta.token_ids[::-1].copy()
        writer.append_record(dataclasses.replace(meta, token_ids=tokens, pieces=meta.pieces[1:]))
    with open_shards(tmp_path / "shards") as store:
        counts = export_shards(store, tmp_path / "out", "modelopt")
    assert counts["records"] == 1 and counts["left out: gaps"] == 1
