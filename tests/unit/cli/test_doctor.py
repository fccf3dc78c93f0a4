"""``specdec-tap doctor`` and ``specdec-tap config``. What vLLM itself answers is tested in tests/e2e."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from specdec_tap import doctor
from specdec_tap.cli import main
from specdec_tap.config import TapConfig, field_docs

LLAMA = {
    "vllm": "0.32.0",
    "device": "cuda",
    "runner": "v2",
    "architecture": "LlamaForCausalLM",
    "model_class": "LlamaForCausalLM",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 128_256,
    "dtype": "bfloat16",
    "aux_layer_ids": [2, 16, 29],
    "why_not": None,
}


@pytest.fixture(autouse=True)
def no_tap_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SPECDEC_TAP") or name == "VLLM_PLUGINS"]:
        monkeypatch.delenv(name)


def find(report: doctor.Report, name: str) -> doctor.Check:
    return next(check for check in report.checks if check.name == name)


def report_on(answer: dict, **settings) -> doctor.Report:
    report = doctor.Report()
    doctor.check_model(report, "some/model", answer)
    config = TapConfig(dir=Path("shards"), **settings) if settings else None
    doctor.estimate_sizes(report, tokens_per_s=1000, response_share=0.5, config=config)
    return report


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [
        (
            "0.29.1",
            "fail",
            r"vllm 0\.29\.1 is not supported \(0\.30 to 0\.32 are\); install a supported version",
        ),
        ("0.30.0", "ok", r"0\.30\.0"),
        ("0.32.0+cpu", "ok", r"0\.32\.0\+cpu"),
        ("0.33.0", "warn", r"vllm 0\.33\.0 is newer than the newest tested \(0\.30 to 0\.32\)"),
        ("1.0.0", "warn", "newer than the newest tested"),
        (None, "fail", r"not installed here; install it with 'pip install \"specdec-tap\[vllm\]\"'"),
    ],
)
def test_the_vllm_version_is_judged(monkeypatch, version, status, text):
    monkeypatch.setattr(doctor, "vllm_version", lambda: version)
    report = doctor.Report()
    usable = doctor.check_versions(report)
    check = find(report, "vllm")
    assert check.status == status
    assert re.search(text, check.detail)
    assert usable == (status != "fail")


def test_an_unsupported_vllm_exits_1_and_is_not_asked_about_the_model(monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(doctor, "vllm_version", lambda: "0.11.0")
    monkeypatch.setattr(doctor, "probe_model", lambda *a, **k: pytest.fail("must not be asked"))
    assert main(["doctor", str(tmp_path)]) == 1
    assert "vllm 0.11.0 is not supported" in capsys.readouterr().out


def test_a_missing_model_folder_is_wrong_usage(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert "does not exist; give a Hugging Face folder" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_a_plugin_left_out_by_vllm_plugins_is_found(monkeypatch, capsys):
    """VLLM_PLUGINS without specdec_tap switches capture off silently: no error anywhere, and no shards."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    assert main(["doctor"]) == 1
    assert "VLLM_PLUGINS is 'lora_filesystem_resolver'; add specdec_tap to it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plugins", "said"),
    [(None, False), ("specdec_tap", False), ("a,specdec_tap", False), ("a", True), ("", True)],
)
def test_the_shown_settings_tell_when_vllm_would_not_load_the_tap(monkeypatch, capsys, plugins, said):
    """B48: nothing of ours runs in such a server, so only what is started beside it can say so."""
    monkeypatch.setenv("SPECDEC_TAP_DIR", "shards")
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert main(["config", "show"]) == 0
    out, err = capsys.readouterr()
    assert "capture is on" in out
    assert ("but vLLM would not load the tap: VLLM_PLUGINS is" in err) is said


def test_wrong_settings_are_a_failed_check(monkeypatch, capsys):
    monkeypatch.setenv("SPECDEC_TAP_DIRR", "x")
    assert main(["doctor"]) == 1
    assert "did you mean SPECDEC_TAP_DIR?" in capsys.readouterr().out


def test_the_model_check_names_layers_and_runner():
    report = report_on(LLAMA)
    assert find(report, "runner").detail == "model runner V2 on cuda"
    assert "has the EAGLE-3 interface; 32 layers, hidden size 4,096" in find(report, "model").detail
    assert find(report, "aux layers").detail == "[2, 16, 29] by default (2, N//2, N-3)"


def test_a_refusal_of_vllm_is_a_failed_check_without_an_estimate():
    report = report_on(LLAMA | {"why_not": "GPT2LMHeadModel has no EAGLE-3 interface"})
    assert find(report, "model").status == "fail"
    assert report.sizes is None


def test_a_shallow_model_gets_a_warning_about_its_default_layers():
    """With 6 layers 2, N//2 and N-3 are 2, 3, 3; vLLM drops the double and the drafter's fc does not fit."""
    check = find(report_on(LLAMA | {"num_hidden_layers": 6, "aux_layer_ids": [2, 3]}), "aux layers")
    assert check.status == "warn"
    assert "[2, 3] for N = 6" in check.detail


def test_no_device_is_a_warning_and_the_config_is_used():
    report = report_on(LLAMA | {"error": "RuntimeError: no device", "device": None, "runner": None})
    assert find(report, "device").status == "warn"
    assert find(report, "model").status == "ok"


def test_sizes_count_the_final_state_for_response_tokens_only():
    sizes = report_on(LLAMA).sizes
    assert sizes["raw_bytes_per_token"] == 4 * 4096 * 2
    assert sizes["raw_bytes_per_token_kept"] == 3.5 * 4096 * 2
    assert sizes["gb_per_hour"] == pytest.approx(3.5 * 4096 * 2 / 1.5 * 1000 * 3600 / 1e9)


@pytest.mark.parametrize(("scope", "rows"), [("all", 4), ("none", 3), ("response", 3.5)])
def test_sizes_follow_the_settings(scope, rows):
    assert report_on(LLAMA, final_hidden=scope).sizes["raw_bytes_per_token_kept"] == rows * 4096 * 2


def test_more_layers_in_the_settings_cost_more():
    sizes = report_on(LLAMA, aux_layer_ids=(2, 8, 16, 24, 29)).sizes
    assert (sizes["num_aux_layers"], sizes["raw_bytes_per_token"]) == (5, 6 * 4096 * 2)


def test_a_writable_directory_gets_hours_of_room(tmp_path):
    report = report_on(LLAMA)
    doctor.check_directory(report, tmp_path / "shards", None)
    assert find(report, "directory").status == "ok"
    assert "hours" in find(report, "disk").detail
    assert report.sizes["hours_until_full"] > 0
    assert not (tmp_path / "shards").exists()


def test_an_unwritable_directory_is_a_failed_check(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--dir", str(tmp_path / "file" / "shards"), "--json", "-"]) == 1
    check = json.loads(capsys.readouterr().out)["checks"][-1]
    assert (check["name"], check["status"]) == ("directory", "fail")
    assert "cannot be written: Not a directory; choose another" in check["detail"]


def test_a_nearly_full_disk_is_a_failed_check(tmp_path):
    report = doctor.Report()
    doctor.check_directory(report, tmp_path, TapConfig(dir=tmp_path, min_free_bytes=1 << 60))
    assert find(report, "disk").status == "fail"
    assert "capture stops below min_free_bytes" in find(report, "disk").detail


def test_a_codec_that_was_not_compiled_is_named(monkeypatch):
    from specdec_tap.shards import huffman

    for native, status in ((None, "warn"), (huffman, "ok")):
        monkeypatch.setattr(huffman, "native", native)
        assert find(doctor.diagnose(None, None, env={}), "codec").status == status


def test_the_report_is_json(tmp_path, capsys):
    assert main(["doctor", "--dir", str(tmp_path), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {"python", "vllm", "torch", "codec", "plugin", "settings", "directory", "disk"} == {
        check["name"] for check in report["checks"]
    }


# --- config show -----------------------------------------------------------------------------------------


def shown(capsys, *flags: str) -> dict:
    assert main(["config", "show", "--json", "-", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_setting_is_shown_with_its_documentation(capsys):
    settings = shown(capsys)["settings"]
    assert set(settings) == set(field_docs())
    assert all(setting["doc"] and setting["source"] == "default" for setting in settings.values())


def test_sources_are_told_apart(monkeypatch, tmp_path, capsys):
    file = tmp_path / "tap.yaml"
    file.write_text("codec: fp8\nmin_tokens: 9\n")
    monkeypatch.setenv("SPECDEC_TAP_CONFIG", str(file))
    monkeypatch.setenv("SPECDEC_TAP_DIR", "shards")
    monkeypatch.setenv("SPECDEC_TAP_MIN_TOKENS", "5")
    found = shown(capsys, "--additional-config", '{"specdec_tap": {"sample_rate": 0.5}}')
    picked = {
        name: (found["settings"][name]["value"], found["settings"][name]["source"])
        for name in ("dir", "codec", "min_tokens", "sample_rate", "strict")
    }
    assert found["capture"] is True
    assert picked == {
        "dir": ("shards", "environment"),
        "codec": ("fp8", str(file)),
        "min_tokens": (5, "environment"),
        "sample_rate": (0.5, "--additional-config"),
        "strict": (True, "default"),
    }


def test_the_table_says_how_to_turn_capture_on(capsys):
    assert main(["config", "show", "--docs"]) == 0
    out, err = capsys.readouterr()
    assert "capture is off" in out
    assert "SPECDEC_TAP_MAX_BYTES" in out
    assert "set SPECDEC_TAP_DIR=shards to turn it on" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--additional-config is no JSON"),
        ("[]", "expected an object"),
        ('{"specdec-tap": {}}', 'has no key "specdec_tap"'),
        ('{"specdec_tap": {"dirr": "x"}}', "did you mean dir?"),
    ],
)
def test_a_wrong_additional_config_is_explained(capsys, text, message):
    assert main(["config", "show", "--additional-config", text]) == 2
    assert message in capsys.readouterr().err
