"""Settings of the tap: where they come from, and what is said of a wrong one."""

from __future__ import annotations

import dataclasses
import re
import stat
from pathlib import Path

import pytest

from specdec_tap.config import TapConfig, field_docs, prepare_directory
from specdec_tap.errors import ConfigError


def load(additional: object = None, **env: str):
    env = {f"SPECDEC_TAP_{name}": value for name, value in env.items()}
    return TapConfig.load(env, None if additional is None else {"specdec_tap": additional})


def message(additional: object = None, **env: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(additional, **env)
    return str(error.value)


def test_capture_is_off_unless_a_folder_is_named():
    assert load() == (None, {})
    assert load({}) == (None, {})
    assert TapConfig.load({"SPECDEC_TAP": "off", "SPECDEC_TAP_DIR": "x"}) == (None, {})


def test_later_places_win_and_each_value_says_where_it_came_from(tmp_path):
    file = tmp_path / "tap.yaml"
    file.write_text("dir: from-file\nsample_rate: 0.25\ncodec: int8\n")
    config, sources = load({"codec": "fp8"}, CONFIG=str(file), SAMPLE_RATE="0.5")
    assert (str(config.dir), config.sample_rate, config.codec) == ("from-file", 0.5, "fp8")
    assert sources == {"dir": str(file), "sample_rate": "environment", "codec": "--additional-config"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("MAX_SHARD_BYTES", "50MB", 50_000_000),
        ("MAX_SHARD_BYTES", "1 GiB", 1 << 30),
        ("MAX_SHARD_BYTES", "1e6", 1_000_000),
        ("MAX_SHARD_AGE_S", "30m", 1800.0),
        ("MAX_AGE_S", "7d", 604800.0),
        ("MAX_AGE_S", "none", None),
        ("AUX_LAYER_IDS", "2,15,27", (2, 15, 27)),
        ("AUX_LAYER_IDS", "[2, 15]", (2, 15)),
        ("RESPONSE_WINDOW", "0,64", (0, 64)),
        ("STRICT", "no", False),
        ("STRICT", "True", True),
        ("MAX_TOKENS", "", None),
        ("DIR", "~/x", Path("~/x").expanduser()),
    ],
)
def test_words_units_and_lists_are_understood(name, text, value):
    config, _ = load(**({"DIR": "d"} | {name: text}))
    assert getattr(config, name.lower()) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("SAMPLE_RATE", "1.5", "sample_rate is 1.5; expected 0 to 1"),
        ("SAMPLE_RATE", "nan", "sample_rate is 'nan'; expected a number"),
        ("SAMPLE_RATE", "half", "sample_rate is 'half'; expected a number (environment)"),
        ("AUX_LAYER_IDS", "3,2", "aux_layer_ids is [3, 2]; expected distinct ascending ids >= 0 such as"),
        ("AUX_LAYER_IDS", "2,x", "aux_layer_ids is '2,x'; expected integers such as 2,15,27"),
        ("AUX_LAYER_IDS", "[2", "aux_layer_ids is '[2'; expected integers such as 2,15,27"),
        ("MAX_TOKENS", "1", "max_tokens is 1, below min_tokens 2"),
        ("RESPONSE_WINDOW", "5,5", "response_window is [5, 5]; expected [a, b] with 0 <= a < b, in tokens"),
        ("RESPONSE_WINDOW", "5", "response_window is [5]; expected [a, b] with 0 <= a < b, in tokens"),
        ("MAX_SHARD_BYTES", "100", "max_shard_bytes is 100; expected at least 65,536"),
        ("MAX_SHARD_BYTES", "1e400", "max_shard_bytes is inf; expected a finite number"),
        ("MAX_SHARD_BYTES", "1.5", "max_shard_bytes is 1.5; expected a whole number"),
        ("MAX_SHARD_BYTES", "5 parsec", "max_shard_bytes is '5 parsec'; expected a number or a unit such as"),
        ("MAX_BYTES", "1MB", "max_bytes is 1,000,000; expected at least two shards (max_shard_bytes is"),
        ("MIN_TOKENS", "-1", "min_tokens is -1; expected 0 or more"),
        ("RING_BYTES", "-64", "ring_bytes is -64; expected 0 or more"),
        ("MIN_FREE_BYTES", "-1", "min_free_bytes is -1; expected 0 or more"),
        ("MAX_SHARD_AGE_S", "0", "max_shard_age_s is 0.0; expected more than 0 seconds"),
        ("MAX_AGE_S", "-1", "max_age_s is -1.0; expected more than 0 seconds"),
        ("WRITER_NICE", "20", "writer_nice is 20; expected 0 to 19"),
        ("CODEC", "zip", "codec is 'zip'; expected one of 'lossless', 'fp8', 'int8'"),
        ("FINAL_HIDDEN", "some", "final_hidden is 'some'; expected one of 'response', 'all', 'none'"),
        ("CONSENT", "yes", "consent is 'yes'; expected one of 'opt_out', 'opt_in'"),
        ("STRICT", "maybe", "strict is 'maybe'; expected true or false"),
        (
            "SAMPLERATE",
            "1",
            "SAMPLERATE (environment) is not a setting of the tap; did you mean SPECDEC_TAP_SAMPLE_RATE?",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(name, text, expected):
    assert expected in message(DIR="d", **{name: text})


def test_every_problem_is_reported_at_once():
    text = message({"dir": "d", "samplerate": 1, "codec": "zip", "strict": "maybe"})
    for part in ("samplerate (--additional-config) is not a setting of the tap; did you mean sample_rate?",
                 "codec is 'zip'", "strict is 'maybe'"):  # fmt: skip
        assert part in text
    text = message({"dir": "d", "sample_rate": 2, "writer_nice": -1})
    assert "sample_rate is 2.0" in text
    assert "writer_nice is -1" in text


def test_settings_without_a_folder_are_an_error_not_silence():
    expected = "sample_rate set but dir is not; set SPECDEC_TAP_DIR to the folder for the shards"
    assert message(SAMPLE_RATE="0.5") == expected


def test_a_section_that_is_no_object_is_refused():
    assert message(["dir"]).startswith("--additional-config 'specdec_tap' is ['dir']; expected an object")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "SPECDEC_TAP_CONFIG is {path!r}, which cannot be read: No such file or directory"),
        (b"\xff\xfe\x00", "which cannot be read: it is not UTF-8 text"),
        (b"dir: [unclosed", "is not valid YAML"),
        (b"- a\n- b\n", "holds a list; expected a mapping of settings"),
    ],
)
def test_a_bad_settings_file_is_named(tmp_path, content, expected):
    path = tmp_path / "tap.yaml"
    if content is not None:
        path.write_bytes(content)
    text = message(CONFIG=str(path))
    assert expected.format(path=str(path)) in text
    assert str(path) in text


@pytest.mark.parametrize("value", [True, [1], {"a": 1}])
def test_values_of_the_wrong_kind_are_refused(value):
    assert "sample_rate is " in message({"dir": "d", "sample_rate": value})


def test_settings_survive_the_way_to_the_writer_process():
    config, _ = load({"dir": "d", "aux_layer_ids": [1, 2], "response_window": [0, 9], "max_age_s": "1h"})
    assert TapConfig.from_json(config.to_json()) == config


def test_the_settings_are_frozen_and_each_is_documented():
    config, _ = load(DIR="d")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sample_rate = 0.5
    docs = field_docs()
    assert set(docs) == {field.name for field in dataclasses.fields(TapConfig)}
    assert all(len(doc) > 20 for doc in docs.values())


def test_the_folder_is_made_private(tmp_path):
    prepare_directory(tmp_path / "a" / "shards")
    assert stat.S_IMODE((tmp_path / "a" / "shards").stat().st_mode) == 0o700
    assert list((tmp_path / "a" / "shards").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "shards"
    with pytest.raises(ConfigError, match=re.escape(f"dir is {str(folder)!r} but no file can be written")):
        prepare_directory(folder)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
