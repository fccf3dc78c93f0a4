"""``specdec-tap eval`` against a stand-in server whose counters are known. Real drafters: tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_tap import evaluate, serving
from specdec_tap.cli import main
from specdec_tap.cli.eval import speculative_config
from specdec_tap.evaluate import DraftCounts


@pytest.fixture(autouse=True)
def settle_quickly(monkeypatch):
    monkeypatch.setattr(evaluate, "SETTLE_S", 0.01)


def write_prompts(path: Path, categories: list[str | None]) -> Path:
    rows = [
        {"id": f"p{i}", "turns": [f"question {i}"]} | ({"category": c} if c else {})
        for i, c in enumerate(categories)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_drafter(folder: Path, config: dict, *, weights: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_counters_are_summed_over_engines_and_differenced():
    text = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 70.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 10.0
"""
    after = DraftCounts.from_metrics(serving.parse_metrics(text))
    assert after == DraftCounts(
        num_drafts=100, num_draft_tokens=300, num_accepted_tokens=50, accepted_per_position=(40, 0, 10)
    )
    before = DraftCounts(
        num_drafts=50, num_draft_tokens=150, num_accepted_tokens=20, accepted_per_position=(15, 0, 5)
    )
    delta = after - before
    assert delta.acceptance_length == pytest.approx(1 + 30 / 50)
    assert delta.acceptance_rate == pytest.approx(30 / 150)
    assert delta.acceptance_per_position == pytest.approx((25 / 50, 0, 5 / 50))


def test_no_counters_are_none_and_not_zero():
    assert DraftCounts.from_metrics(serving.parse_metrics("vllm:num_requests_running 0\n")) is None
    assert DraftCounts().acceptance_length is None
    assert DraftCounts().acceptance_per_position == ()


def test_label_values_may_hold_commas_and_escaped_quotes():
    (sample,) = serving.parse_metrics('a_total{x="1,2",y="say \\"hi\\""} 4')
    assert (sample.labels["x"], sample.labels["y"], sample.value) == ("1,2", 'say \\"hi\\"', 4.0)


def test_a_running_server_is_measured_by_counter_differences(tmp_path, stand_in, capsys):
    """The server has drafted before; only what these prompts add may count, and the warm-up request not."""
    stand_in.accepted = (5, 2, 1)
    prompts = write_prompts(tmp_path / "p.jsonl", ["a", "b", "a", "b", "a"])
    assert main(["eval", "--url", stand_in.url, "--prompts", str(prompts), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_drafts"] == 50
    assert found["acceptance_length"] == pytest.approx(1.8)
    assert found["acceptance_per_position"] == pytest.approx([0.5, 0.2, 0.1])
    assert found["requests"] == 5
    assert {name: counts["num_drafts"] for name, counts in found["categories"].items()} == {"a": 30, "b": 20}
    assert found["baseline_output_tokens_per_s"] is None


def test_the_table_shows_length_and_categories(tmp_path, stand_in, capsys):
    stand_in.accepted = (5, 2, 1)
    prompts = write_prompts(tmp_path / "p.jsonl", ["math", "code"])
    assert main(["eval", "--url", stand_in.url, "--prompts", str(prompts)]) == 0
    out = capsys.readouterr().out
    assert "1.800" in out
    assert "0.500 0.200 0.100" in out
    assert "math" in out


def test_prompts_without_category_give_no_category_table(tmp_path, stand_in, capsys):
    stand_in.accepted = (5,)
    prompts = write_prompts(tmp_path / "p.jsonl", [None, None])
    assert main(["eval", "--url", stand_in.url, "--prompts", str(prompts), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["categories"] == {}


def test_a_server_without_speculative_decoding_is_refused(tmp_path, stand_in, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", [None])
    assert main(["eval", "--url", stand_in.url, "--prompts", str(prompts)]) == 2
    assert "does no speculative decoding" in capsys.readouterr().err


def test_a_server_that_drafts_nothing_exits_1(tmp_path, stand_in, capsys, monkeypatch):
    """For example a drafter that vLLM skips for every request: an acceptance length of 1.0 would hide it."""
    stand_in.accepted = (1,)
    monkeypatch.setattr(type(stand_in), "answered", property(lambda self: 7, lambda self, value: None))
    prompts = write_prompts(tmp_path / "p.jsonl", [None])
    assert main(["eval", "--url", stand_in.url, "--prompts", str(prompts)]) == 1
    out, err = capsys.readouterr()
    assert "no drafts" in out
    assert "the server drafted nothing" in err


def test_failed_requests_are_no_measurement(tmp_path, stand_in, capsys, monkeypatch):
    stand_in.accepted = (1,)
    monkeypatch.setattr(evaluate.engine, "MAX_BACKOFF_S", 0.0)
    prompts = write_prompts(tmp_path / "p.jsonl", [None])
    stand_in.failures = [500] * 100
    assert main(["eval", "--url", stand_in.url, "--prompts", str(prompts)]) == 2
    assert "fails at its first request" in capsys.readouterr().err


def test_the_plot_is_a_picture(tmp_path, stand_in):
    stand_in.accepted = (5, 2, 1)
    prompts = write_prompts(tmp_path / "p.jsonl", ["a", "b"])
    plot = tmp_path / "e.png"
    assert main(["eval", "--url", stand_in.url, "--prompts", str(prompts), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 5000


def test_loads_are_measured_one_after_the_other(tmp_path, stand_in, capsys):
    stand_in.accepted = (5, 2, 1)
    prompts = write_prompts(tmp_path / "p.jsonl", ["a", "b"])
    plot = tmp_path / "e.png"
    arguments = ["eval", "--url", stand_in.url, "--prompts", str(prompts), "--loads", "4,1", "--json", "-"]
    assert main([*arguments, "--plot", str(plot)]) == 0
    found = json.loads(capsys.readouterr().out)
    # The measurement itself is of the first pass only.
    assert (found["requests"], found["num_drafts"]) == (2, 20)
    assert [load["concurrency"] for load in found["loads"]] == [1, 4]
    assert all(load["output_tokens_per_s"] > 0 and load["speedup"] is None for load in found["loads"])
    assert plot.stat().st_size > 8000


def test_speed_up_compares_equal_loads():
    loads = evaluate.join_loads({4: 90.0, 1: 30.0}, {1: 20.0, 4: 100.0})
    assert [(load.concurrency, load.speedup) for load in loads] == [(1, 1.5), (4, 0.9)]
    assert evaluate.join_loads({2: 5.0}, {})[0].speedup is None


def test_loads_that_are_no_numbers_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--url", "u", "--loads", "1,many"])
    assert "--loads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "medusa"),
    ],
)
def test_the_method_is_read_from_the_drafter(tmp_path, config, method):
    drafter = write_drafter(tmp_path / "d", config)
    assert speculative_config(drafter, 5) == {
        "method": method,
        "model": str(drafter),
        "num_speculative_tokens": 5,
    }


def test_a_parallel_drafter_is_served_as_one(tmp_path):
    config = {"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 3, "mask_token_id": 3}
    assert speculative_config(write_drafter(tmp_path / "d", config), 4)["parallel_drafting"] is True


def evaluate_drafter(tmp_path: Path, drafter: Path) -> int:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return main(["eval", "--drafter", str(drafter), "--model", str(model)])


def test_a_folder_that_is_no_drafter_is_explained(tmp_path, capsys):
    assert evaluate_drafter(tmp_path, tmp_path / "none") == 2
    assert "has no readable config.json (No such file or directory)" in capsys.readouterr().err
    assert evaluate_drafter(tmp_path, write_drafter(tmp_path / "a", {"architectures": ["Llama"]})) == 2
    assert "expected a drafter of algorithm eagle3, peagle, eagle1, medusa" in capsys.readouterr().err
    empty = write_drafter(tmp_path / "b", {"architectures": ["Eagle3X"]}, weights=False)
    assert evaluate_drafter(tmp_path, empty) == 2
    assert "holds no .safetensors file" in capsys.readouterr().err
    broken = write_drafter(tmp_path / "c", {})
    (broken / "config.json").write_text("[")
    assert evaluate_drafter(tmp_path, broken) == 2
    assert "is no JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "eval needs --drafter and --model"),
        (["--drafter", "d"], "eval needs --drafter and --model"),
        (["--url", "u", "--drafter", "d"], "--drafter has no effect with --url"),
        (["--drafter", "d", "--model", "m", "--baseline-url", "u"], "--baseline-url has no effect without"),
        (["--url", "u", "--json", "/no/such/folder/x.json"], "folder that does not exist"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags, message, capsys):
    assert main(["eval", *flags]) == 2
    assert message in capsys.readouterr().err
