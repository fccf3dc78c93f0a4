"""Records as PyTorch and Hugging Face samples, in this process and in workers."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shardkit import make_header, write_request

from specdec_tap.errors import CorruptShardError, InputError
from specdec_tap.shards import ShardWriter, Span, open_shards

torch = pytest.importorskip("torch")

from specdec_tap.shards import ShardDataset, hf_dataset, pad_samples  # noqa: E402

LENGTHS = [(5, 70), (20, 30), (40, 1), (3, 140)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "shards", make_header()) as writer:
        for seed, (prompt, response) in enumerate(LENGTHS):
            write_request(writer, prompt, response, seed=seed, request_id=f"r{seed}")
            if seed == 1:
                writer.rotate()
    return tmp_path / "shards"


def test_a_sample_is_the_record(folder: Path) -> None:
    dataset = ShardDataset(folder)
    assert len(dataset) == len(LENGTHS)
    with open_shards(folder) as store:
        for sample, record, (prompt, response) in zip(dataset, store, LENGTHS, strict=True):
            assert sample["record_id"] == record.id
            assert sample["input_ids"].tolist() == record.token_ids.tolist()
            assert sample["loss_mask"].tolist() == [False] * prompt + [True] * response
            assert sample["aux"].dtype == torch.bfloat16
            assert torch.equal(sample["aux"], record.aux_torch())
            assert sample["state_mask"].all()
            assert sample["final_mask"].nonzero().flatten().tolist() == list(
                range(prompt - 1, prompt + response - 1)
            )
            assert torch.equal(sample["final"][prompt - 1 :], record.final_torch(prompt - 1, record.num_rows))
            assert not sample["final"][: prompt - 1].any()
    with pytest.raises(IndexError):
        dataset[len(LENGTHS)]


def test_gaps_are_zeros_under_a_false_mask(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, make_header()) as writer:
        meta, aux, _ = write_request(writer, 70, 30)
        other = meta.token_ids[::-1].copy()
        writer.append_record(dataclasses.replace(meta, token_ids=other, pieces=meta.pieces[1:]))
    sample = ShardDataset(tmp_path, final=False)[1]
    assert sample["state_mask"].tolist() == [False] * 64 + [True] * 35
    assert not sample["aux"][:64].any()
    assert np.array_equal(
        sample["aux"][64:].view(torch.int16).numpy().view(np.uint16), aux[:, 64:].swapaxes(0, 1)
    )
    assert "final" not in sample


def test_turns_are_stitched_on_request(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, make_header()) as writer:
        first, _, _ = write_request(writer, 10, 20, seed=1)
        later = np.concatenate([first.token_ids, np.arange(30, dtype=np.int32)])
        write_request(writer, 40, 20, seed=2, tokens=later)
    dataset = ShardDataset(tmp_path, stitched=True)
    assert len(dataset) == 1
    assert dataset[0]["loss_mask"].nonzero().flatten().tolist() == [*range(10, 30), *range(40, 60)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_what_this_process_reads(folder: Path, method: str) -> None:
    """The store is in use here when the workers start: they must not share its locks or caches."""
    dataset = ShardDataset(folder)
    here = [dataset[i] for i in range(len(dataset))]
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        multiprocessing_context=multiprocessing.get_context(method),
        timeout=60,
    )
    there = list(loader)
    assert [sample["record_id"] for sample in there] == [sample["record_id"] for sample in here]
    for one, two in zip(here, there, strict=True):
        assert torch.equal(one["aux"], two["aux"]) and torch.equal(one["final"], two["final"])


def test_a_pickled_dataset_holds_no_open_file(folder: Path) -> None:
    dataset = ShardDataset(folder)
    _ = dataset[0]
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[2]["aux"], dataset[2]["aux"])


def test_padding_is_masked(folder: Path) -> None:
    batch = pad_samples([ShardDataset(folder)[i] for i in (1, 2)])
    assert batch["input_ids"].shape == (2, 50)
    assert batch["token_mask"].sum(1).tolist() == [50, 41]
    assert batch["aux"].shape == (2, 49, 3, 16) and not batch["aux"][1, 40:].any()
    assert not batch["loss_mask"][1, 41:].any() and not batch["state_mask"][1, 40:].any()


def test_a_damaged_record_is_named(folder: Path) -> None:
    with open_shards(folder) as store:
        blocks, _ = next(store.files()).index()
        path, offset = next(store.files()).path, int(blocks["offset"][0])
    data = bytearray(path.read_bytes())
    data[offset + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptShardError, match=path.name):
        ShardDataset(folder)[0]


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, specdec_tap.shards as s; assert 'torch' not in sys.modules; "
        "s.ShardDataset; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


# ---- Hugging Face


def test_a_hugging_face_dataset_holds_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    dataset = hf_dataset(folder, cache_dir=tmp_path / "cache").with_format("numpy")
    streamed = list(hf_dataset(folder, streaming=True))
    assert dataset.num_rows == len(streamed) == len(LENGTHS)
    with open_shards(folder) as store:
        for row, stream, record in zip(dataset, streamed, store, strict=True):
            assert row["record_id"] == stream["record_id"] == record.id
            assert row["input_ids"].tolist() == stream["input_ids"] == record.token_ids.tolist()
            assert np.array_equal(np.asarray(row["aux"], np.float32), record.aux_float())
            assert np.array_equal(np.asarray(stream["aux"], np.float32), record.aux_float())
            held = np.flatnonzero(row["final_mask"])
            final = record.final_float(int(held[0]), int(held[-1]) + 1)
            assert np.array_equal(np.asarray(row["final"], np.float32)[held], final)


def test_a_grown_folder_is_not_served_from_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    counts = []
    for seed in range(2):
        with ShardWriter(tmp_path / "shards", make_header()) as writer:
            write_request(writer, 5, 10, seed=seed)
        made = hf_dataset(tmp_path / "shards", states=False, cache_dir=tmp_path / "cache")
        assert made.column_names == ["record_id", "input_ids", "loss_mask"]
        counts.append(made.num_rows)
    assert counts == [1, 2]


def test_without_the_package_datasets_the_error_says_so(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        hf_dataset(folder)


def test_spans_of_earlier_turns_count_as_response(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, make_header()) as writer:
        meta, _, _ = write_request(writer, 10, 20)
        spans = (
            Span(0, 4, "prompt"),
            Span(4, 8, "response"),
            Span(8, 10, "prompt"),
            Span(10, 30, "response"),
        )
        writer.append_record(dataclasses.replace(meta, spans=spans))
    assert ShardDataset(tmp_path)[1]["loss_mask"].nonzero().flatten().tolist() == [
        *range(4, 8),
        *range(10, 30),
    ]
