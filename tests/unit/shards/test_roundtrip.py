"""What is written is read back, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from shardkit import make_header, random_states, write_request

from specdec_tap.errors import ShardError, StreamBusyError
from specdec_tap.shards import ShardWriter, decode_block, encode_block, open_shards


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [1, 7, 8, 64])
def test_lossless_blocks_keep_every_bit(dtype, rows):
    header = make_header(dtype=dtype)
    aux, final = random_states(header, rows)
    block = decode_block(header, encode_block(header, position=5, aux=aux, final=final[1:], final_row=1))
    assert np.array_equal(block.aux, aux)
    assert block.position == 5 and block.final_row == (1 if rows > 1 else 0)
    if rows > 1:
        assert np.array_equal(block.final, final[1:])
    else:
        assert block.final is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_lossless_keeps_nan_infinity_and_every_pattern(dtype):
    header = make_header(dtype=dtype, hidden_size=1024, aux_layer_ids=(1,))
    bits = header.bits_dtype
    step = 1 if bits.itemsize == 2 else 65537
    aux = (np.arange(64 * 1024, dtype=np.uint64) * step).astype(bits).reshape(1, 64, 1024)
    block = decode_block(header, encode_block(header, position=0, aux=aux))
    assert np.array_equal(block.aux, aux)


def test_records_come_back_with_their_states(tmp_path):
    header = make_header()
    with ShardWriter(tmp_path, header) as writer:
        written = [
            write_request(writer, p, r, seed=s) for s, (p, r) in enumerate([(5, 3), (100, 70), (2, 200)])
        ]
        live = open_shards(tmp_path)
        assert len(live) == 3 and not live.shards[0].sealed
    sealed = open_shards(tmp_path)
    for store in (live, sealed):
        for record, (meta, aux, final) in zip(store, written, strict=True):
            assert record.meta == meta and record.gaps == []
            assert np.array_equal(record.aux(), aux.transpose(1, 0, 2))
            prompt = meta.spans[0].stop
            assert record.final_span == [(prompt - 1, record.num_rows)]
            assert np.array_equal(record.final(prompt - 1, record.num_rows), final[prompt - 1 :])
            with pytest.raises(ShardError, match="no final states"):
                record.final(prompt - 2, prompt)
    assert sealed.shards[0].sealed and sealed.shards[0].num_records == 3


def test_blocks_of_earlier_shards_are_found(tmp_path):
    writer = ShardWriter(tmp_path, make_header(), max_shard_bytes=40_000)
    for seed in range(20):
        write_request(writer, 10, 60, seed=seed)
    writer.close()
    store = open_shards(tmp_path)
    assert len(store.shards) > 2 and len(store) == 20
    for seed, record in enumerate(store):
        assert np.array_equal(record.aux(), random_states(make_header(), 69, seed)[0].transpose(1, 0, 2))


def test_reader_follows_a_live_stream(tmp_path):
    writer = ShardWriter(tmp_path, make_header(), max_shard_bytes=30_000)
    store = open_shards(tmp_path, follow=True)
    assert len(store) == 0
    for seed in range(12):
        write_request(writer, 10, 60, seed=seed)
        assert store.refresh() == 1
        assert store[seed].meta.request_id == "req"
    writer.close()
    assert store.refresh() == 0
    for seed in range(12):
        assert np.array_equal(store[seed].aux(), random_states(make_header(), 69, seed)[0].transpose(1, 0, 2))


def test_second_writer_in_one_stream_is_refused(tmp_path):
    with (
        ShardWriter(tmp_path, make_header()),
        pytest.raises(StreamBusyError, match="another writer is alive"),
    ):
        ShardWriter(tmp_path, make_header())
    ShardWriter(tmp_path, make_header()).close()


def test_sealed_shard_is_plain_safetensors(tmp_path):
    from safetensors import safe_open

    with ShardWriter(tmp_path, make_header()) as writer:
        write_request(writer, 5, 5)
    with safe_open(tmp_path / "s0" / "000001.safetensors", "np") as file:
        assert sorted(file.keys()) == ["frames", "index"]
        assert file.get_tensor("frames").dtype == np.uint8
        assert file.metadata()["format"] == "specdec-tap"


def test_torch_views_have_the_shards_dtype(tmp_path):
    torch = pytest.importorskip("torch")
    with ShardWriter(tmp_path, make_header()) as writer:
        write_request(writer, 5, 5)
    record = open_shards(tmp_path)[0]
    tensor = record.aux_torch()
    assert tensor.dtype is torch.bfloat16 and tuple(tensor.shape) == (9, 3, 16)
    assert np.array_equal(tensor.float().numpy(), record.aux_float())
