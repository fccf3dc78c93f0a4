"""Dumps of the neighbours come in with their meaning, and go out so that they come in again."""

from __future__ import annotations

import dataclasses
import gzip
import io
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shardkit import make_header, write_request

from specdec_tap.cli import main
from specdec_tap.errors import InputError
from specdec_tap.shards import ShardWriter, Span, open_shards
from specdec_tap.shards.interchange import export_shards, import_dump
from specdec_tap.shards.interchange.staging import staged
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
    _, counts = import_dump(name.split()[0], dump, tmp_path / "shards", path)
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


def imported_from_modelopt(tmp_path, llama):
    """A shards folder with the one conversation of ``llama``."""
    dump = tmp_path / "dump"
    dump.mkdir()
    dump_modelopt(dump, llama)
    import_dump("modelopt", dump, tmp_path / "a", llama[0])
    return tmp_path / "a"


def test_an_export_for_the_connector_has_its_layout(tmp_path, llama):
    """One file a request: states of four layers and the token ids, the last state before the norm."""
    from safetensors.numpy import load_file

    shards = imported_from_modelopt(tmp_path, llama)
    with open_shards(shards) as a:
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
    shards = imported_from_modelopt(tmp_path, llama)
    with open_shards(shards) as store:
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


def flagged(folder: Path, llama, flag, *, vllm: bool, name: str = "c1"):
    """A Model-Optimizer dump whose file says what its final states are."""
    dump_modelopt(folder, llama, vllm=vllm)
    data = torch.load(folder / "c1.pt", weights_only=True)
    torch.save(data | {"hidden_states_prenorm": flag, "conversation_id": name}, folder / f"{name}.pt")


@pytest.mark.parametrize("vllm", [True, False])
@pytest.mark.parametrize("name", ["modelopt", "modelopt-vllm"])
def test_a_dumps_own_word_on_its_norm_beats_the_formats_default(tmp_path, llama, name, vllm):
    (tmp_path / "dump").mkdir()
    flagged(tmp_path / "dump", llama, vllm, vllm=vllm)
    import_dump(name, tmp_path / "dump", tmp_path / "shards", llama[0])
    with open_shards(tmp_path / "shards") as store:
        assert store.header.aux_layer_ids == (2, 4, 5)
        for start, stop in store[0].final_span:
            assert np.allclose(store[0].final_float(start, stop), llama[3][start:stop].numpy(), atol=2e-5)


def test_a_false_word_on_the_norm_is_refused(tmp_path, llama):
    """By what is measured; a --final-hidden that the measurement agrees with overrules the file."""
    (tmp_path / "dump").mkdir()
    flagged(tmp_path / "dump", llama, True, vllm=False)
    with pytest.raises(InputError, match="c1: final states are post_norm by their size, but its file says"):
        import_dump("modelopt", tmp_path / "dump", tmp_path / "x", llama[0])
    with pytest.raises(InputError, match="post_norm by their size, not pre_norm"):
        import_dump("modelopt", tmp_path / "dump", tmp_path / "x", llama[0], final_hidden="pre_norm")
    assert not (tmp_path / "x").exists()
    _, counts = import_dump("modelopt", tmp_path / "dump", tmp_path / "y", llama[0], final_hidden="post_norm")
    assert counts["records"] == 1


@pytest.mark.parametrize("second", [None, False])
def test_a_dump_of_mixed_norms_is_refused_with_both_files(tmp_path, llama, second):
    """Every sample's flag counts; none at all means what the format means."""
    (tmp_path / "dump").mkdir()
    flagged(tmp_path / "dump", llama, True, vllm=True)
    data = torch.load(tmp_path / "dump" / "c1.pt", weights_only=True) | {"conversation_id": "c2"}
    data["hidden_states_prenorm"] = second
    torch.save({k: v for k, v in data.items() if v is not None}, tmp_path / "dump" / "c2.pt")
    words = r"c1 says pre_norm, c2 says (nothing|post_norm) .* from a folder of its own"
    with pytest.raises(InputError, match=words):
        import_dump("modelopt", tmp_path / "dump", tmp_path / "x", llama[0])
    if second is None:  # the same thing where nothing means pre-norm
        _, counts = import_dump("modelopt-vllm", tmp_path / "dump", tmp_path / "y", llama[0])
        assert counts["records"] == 2


def test_layer_ids_of_an_unclear_convention_are_asked_for(tmp_path, llama):
    (tmp_path / "dump").mkdir()
    flagged(tmp_path / "dump", llama, True, vllm=True)
    ids = {"layer_ids": (2, 4, 5)}
    with pytest.raises(
        InputError, match=r"says pre_norm.* what --layers counts is not certain.*--convention"
    ):
        import_dump("modelopt", tmp_path / "dump", tmp_path / "x", llama[0], **ids)
    import_dump("modelopt", tmp_path / "dump", tmp_path / "y", llama[0], **ids, layer_shift=0)
    import_dump("modelopt-vllm", tmp_path / "dump", tmp_path / "z", llama[0], **ids)
    for root in ("y", "z"):
        with open_shards(tmp_path / root) as store:
            assert store.header.aux_layer_ids == (2, 4, 5)


def test_a_flag_that_is_no_bool_is_named(tmp_path, llama):
    flagged(tmp_path, llama, "yes", vllm=True)
    with pytest.raises(InputError, match=r"c1\.pt: hidden_states_prenorm is 'yes' \(str\); expected True or"):
        import_dump("modelopt", tmp_path, tmp_path / "x", llama[0])


def with_long_prompt(root: Path, llama) -> Path:
    """Shards with final states for the last eight rows only."""
    dump = root / "dump"
    dump.mkdir()
    dump_modelopt(dump, llama)
    data = torch.load(dump / "c1.pt", weights_only=True)
    data["loss_mask"] = (torch.arange(T) >= T - 8).long()
    torch.save(data, dump / "c1.pt")
    import_dump("modelopt", dump, root / "a", llama[0])
    return root / "a"


@pytest.mark.parametrize("name", ["modelopt", "modelopt-vllm", "specforge", "eagle"])
def test_zeros_before_the_response_do_not_hide_the_norm(tmp_path, llama, name):
    """Most rows of an export may have no final state: measuring them, too, would apply the norm twice."""
    with open_shards(with_long_prompt(tmp_path, llama)) as store:
        export_shards(store, tmp_path / "out", name)
        import_dump(name, tmp_path / "out", tmp_path / "b", llama[0])
        with open_shards(tmp_path / "b") as again:
            for start, stop in again[0].final_span:
                pair = again[0].final_float(start, stop), store[0].final_float(start, stop)
                assert np.allclose(*pair, atol=2e-5)


def test_a_norm_that_changes_nothing_does_not_contradict_the_flag(tmp_path, llama):
    """With weights of one, undoing the norm gives the same numbers, which look post-norm by their size."""
    from safetensors.torch import load_file, save_file

    plain = tmp_path / "model"
    plain.mkdir()
    (plain / "config.json").write_bytes((llama[0] / "config.json").read_bytes())
    tensors = load_file(llama[0] / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    save_file(tensors, plain / "model.safetensors")
    final = torch.nn.functional.rms_norm(llama[2][LAYERS], (HIDDEN,), eps=1e-6)
    (tmp_path / "dump").mkdir()
    dump_modelopt(tmp_path / "dump", (plain, llama[1], llama[2], final))
    import_dump("modelopt", tmp_path / "dump", tmp_path / "a", plain)
    with open_shards(tmp_path / "a") as store:
        export_shards(store, tmp_path / "out", "modelopt-vllm")
    assert import_dump("modelopt-vllm", tmp_path / "out", tmp_path / "b", plain)[1]["records"] == 1


LAYOUTS = {
    "modelopt": {
        "input_ids": ("int64", [T - 1]),
        "hidden_states": ("states", [T - 1, HIDDEN]),
        "aux_hidden_states": ("states", [T - 1, 3 * HIDDEN]),
        "loss_mask": ("int64", [T - 1]),
        "conversation_id": str,
        "hidden_states_prenorm": bool,
    },
    "specforge": {
        "input_ids": ("int64", [T - 1]),
        "loss_mask": ("int64", [T - 1]),
        "hidden_state": ("states", [1, T - 1, HIDDEN]),
        "aux_hidden_state": ("states", [1, T - 1, 3 * HIDDEN]),
    },
    "eagle": {
        "input_ids": ("int64", [T - 1]),
        "hidden_state": ("states", [T - 1, HIDDEN]),
        "loss_mask": ("int64", [T - 1]),
    },
}
LAYOUTS["modelopt-vllm"] = LAYOUTS["modelopt"]
FILES = {
    "modelopt": "imported-000001-0.pt",
    "modelopt-vllm": "imported-000001-0.pt",
    "specforge": "rows_0-2000/data_0.ckpt",
    "eagle": "0/data_0.ckpt",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_exported_file_has_exactly_its_tools_keys_shapes_and_dtypes(tmp_path, llama, name, dtype):
    """Read as the tool does: torch.load of plain tensors; a state is the same number as in the shard."""
    (tmp_path / "dump").mkdir()
    dump_modelopt(tmp_path / "dump", llama)
    data = torch.load(tmp_path / "dump" / "c1.pt", weights_only=True)
    for key in ("hidden_states", "aux_hidden_states"):
        data[key] = data[key].to(getattr(torch, dtype))
    torch.save(data, tmp_path / "dump" / "c1.pt")
    import_dump("modelopt", tmp_path / "dump", tmp_path / "a", llama[0])
    out = tmp_path / "out"
    with open_shards(tmp_path / "a") as store:
        export_shards(store, out, name)
        aux = torch.from_numpy(store[0].aux_float(0, T - 1)).reshape(T - 1, -1)
        first, last = next(span for span in store[0].final_span if span[1] == T - 1)
        final = torch.from_numpy(store[0].final_float(first, last))
    written = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert written == sorted([FILES[name], "specdec_tap_export.json"])
    found = torch.load(out / FILES[name], weights_only=True)
    layout = LAYOUTS[name]
    assert set(found) == set(layout)
    for key, expected in layout.items():
        if isinstance(expected, type):
            assert type(found[key]) is expected, key
            continue
        kind, shape = expected
        assert found[key].dtype == getattr(torch, dtype if kind == "states" else kind), key
        assert list(found[key].shape) == shape and found[key].is_contiguous(), key
    assert torch.equal(found["input_ids"], llama[1][: T - 1])
    assert set(found["loss_mask"].tolist()) == {0, 1}
    if name != "eagle":
        key = "aux_hidden_state" if name == "specforge" else "aux_hidden_states"
        assert torch.equal(found[key].float().reshape(T - 1, -1), aux)
    if name.startswith("modelopt"):
        assert found["hidden_states_prenorm"] is (name == "modelopt-vllm")
        assert found["conversation_id"] == "imported-000001-0"
    if name != "modelopt-vllm":  # its states are before the norm
        key = "hidden_states" if name == "modelopt" else "hidden_state"
        assert torch.equal(found[key].float().reshape(T - 1, -1)[first:last], final)


@pytest.mark.parametrize("name", ["modelopt", "modelopt-vllm", "specforge", "eagle"])
def test_shards_without_final_states_are_no_dataset_of_these_tools(tmp_path, name):
    with ShardWriter(tmp_path / "shards", make_header(final_hidden="none", final_scope="none")) as writer:
        write_request(writer, 5, 30)
    with open_shards(tmp_path / "shards") as store, pytest.raises(InputError, match="needs final states"):
        export_shards(store, tmp_path / "out", name)


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


def record_ids(shards: Path) -> list[str]:
    with open_shards(shards) as store:
        return [record.id for record in store]


def broken_in_the_middle(dump: Path, llama) -> None:
    """Two sound files around one that is none."""
    dump.mkdir()
    dump_modelopt(dump, llama)
    shutil.copy(dump / "c1.pt", dump / "c3.pt")
    (dump / "c2.pt").write_bytes(b"not a tensor")


def test_an_import_that_is_refused_half_way_adds_nothing(tmp_path, llama, capsys):
    broken_in_the_middle(tmp_path / "dump", llama)
    with pytest.raises(InputError, match=r"c2\.pt"):
        import_dump("modelopt", tmp_path / "dump", tmp_path / "new", llama[0])
    assert not (tmp_path / "new").exists()

    shards = tmp_path / "shards"
    (tmp_path / "good").mkdir()
    dump_modelopt(tmp_path / "good", llama)
    import_dump("modelopt", tmp_path / "good", shards, llama[0])
    before = record_ids(shards), sorted(p.name for p in shards.iterdir())
    command = ["shards", "import", str(shards), str(tmp_path / "dump"), "--from", "modelopt"]
    assert main([*command, "--target", str(llama[0])]) == 2
    assert "c2.pt" in (said := capsys.readouterr().err)
    assert "nothing was imported" in said
    assert (record_ids(shards), sorted(p.name for p in shards.iterdir())) == before


def test_a_second_import_is_a_stream_of_its_own(tmp_path, llama):
    (tmp_path / "dump").mkdir()
    dump_modelopt(tmp_path / "dump", llama)
    names = [import_dump("modelopt", tmp_path / "dump", tmp_path / "s", llama[0])[0] for _ in range(3)]
    assert names == ["imported", "imported-2", "imported-3"]
    assert len(set(record_ids(tmp_path / "s"))) == 3


def test_a_killed_import_is_never_read_and_the_next_one_removes_it(tmp_path, llama):
    (tmp_path / "dump").mkdir()
    dump_modelopt(tmp_path / "dump", llama)
    shards = tmp_path / "shards"
    import_dump("modelopt", tmp_path / "dump", shards, llama[0])
    before = record_ids(shards)
    script = (
        "import os, signal, sys; from pathlib import Path; from specdec_tap.shards.interchange import *\n"
        "dump, shards, model = map(Path, sys.argv[1:])\n"
        "die = lambda done: os.kill(os.getpid(), signal.SIGKILL)\n"
        "import_dump('modelopt', dump, shards, model, progress=die)"
    )
    paths = [str(tmp_path / "dump"), str(shards), str(llama[0])]
    died = subprocess.run([sys.executable, "-c", script, *paths], check=False)
    assert died.returncode == -signal.SIGKILL
    (left,) = shards.glob(".import-*")
    assert list(left.glob("*/*.open"))
    assert record_ids(shards) == before
    assert verify_shards(shards).ok
    import_dump("modelopt", tmp_path / "dump", shards, llama[0])
    assert not left.exists()
    assert len(record_ids(shards)) == 2


def test_an_import_leaves_another_that_is_under_way_alone(tmp_path):
    with staged(tmp_path / "s", "imported") as one, staged(tmp_path / "s", "imported") as other:
        assert one.folder.is_dir()
        for staging in (one, other):
            (staging.folder / staging.stream).mkdir()
            (staging.folder / staging.stream / "000001.open").write_text("x")
        one.publish()
        with pytest.raises(InputError, match=r"cannot make .*imported"):
            other.publish()
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["imported"]


def test_with_a_reference_wrong_layers_and_wrong_states_are_refused_by_name(tmp_path, llama):
    (tmp_path / "dump").mkdir()
    dump_modelopt(tmp_path / "dump", llama)
    arguments = ("modelopt", tmp_path / "dump", tmp_path / "shards", llama[0])
    with pytest.raises(InputError) as wrong:  # of the stream leaving these layers, they are one further on
        import_dump(*arguments, layer_ids=(2, 4, 5), reference=llama[0])
    for held, right in zip((3, 5, 6), (2, 4, 5), strict=True):
        assert f"aux_{held} is nearer to the state entering layer {right}" in str(wrong.value)
    assert "Correct --layers, --convention" in str(wrong.value)
    data = torch.load(tmp_path / "dump" / "c1.pt", weights_only=True)
    torch.save({**data, "hidden_states": data["hidden_states"] * 1.01}, tmp_path / "dump" / "c1.pt")
    with pytest.raises(InputError, match=r"final is the model's state times 1\.01"):
        import_dump(*arguments, reference=llama[0])
    assert not (tmp_path / "shards").exists()
    dump_modelopt(tmp_path / "dump", llama)
    import_dump(*arguments, reference=llama[0])
    assert len(record_ids(tmp_path / "shards")) == 1


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
