"""Whole runs on a tiny target: learning, logs, resume, kill, stop, divergence, freezing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from specdec_trainer import checkpoint, loop, runlog
from specdec_trainer.config import TrainConfig
from specdec_trainer.evaluate import Evaluation
from specdec_trainer.export import check_drafter
from specdec_trainer.run import run
from trainer_fakes import FakeRecord, FakeStore, learnable_store, tiny_target

from specdec_tap.errors import ConfigError, InputError

SMALL = {
    "epochs": 4, "batch_tokens": 90, "ttt_steps": 3, "eval_draft_tokens": 3, "held_out": 0.15,
    "dtype": "float32",
    "log_steps": 1, "broken_keep": 1.0, "lr": 5e-3, "warmup": 0.0,
}  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_target(tmp_path / "model")


def go(target: Path, out: Path, *, store=None, resume: bool = False, **settings):
    config = TrainConfig(**{**SMALL, **settings})
    store = learnable_store(target) if store is None else store
    return run(
        config, Path("shards"), out=out, target_path=target, store=store, resume=resume, tensorboard=False
    )


def lines(out: Path, kind: str) -> list[dict]:
    return [x for x in runlog.read_log(out) if x["kind"] == kind]


@pytest.mark.parametrize(("layers", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32")])
def test_losses_are_finite_and_fall(target: Path, tmp_path: Path, layers: int, dtype: str) -> None:
    """B54, B91: every TTT step learns, for one to three layers."""
    go(target, tmp_path / "run", num_layers=layers, dtype=dtype, epochs=3)
    logged = lines(tmp_path / "run", "train")
    first, last = logged[0]["loss"], logged[-1]["loss"]
    assert np.isfinite(first + last).all()
    assert all(b < a for a, b in zip(first, last, strict=True))


def test_records_that_cannot_be_read_are_counted_and_said(target: Path, tmp_path: Path) -> None:
    store = learnable_store(target)
    store[3]._aux[:] = np.nan
    said: list[str] = []
    config = TrainConfig(**SMALL | {"epochs": 2, "held_out": 0.0, "batch_tokens": 400})
    run(config, Path("shards"), out=tmp_path / "run", target_path=target, store=store, say=said.append,
        tensorboard=False)  # fmt: skip
    assert [x for x in said if x.startswith("1 records could not be read and were left out, such as: record")]
    assert lines(tmp_path / "run", "train")[-1]["damaged_records"] == 1


def test_a_run_learns_and_leaves_a_sound_drafter(target: Path, tmp_path: Path) -> None:
    result = go(target, tmp_path / "run", epochs=30, lr=1e-2, eval_epochs=10)
    assert result.evaluation.simulated_acceptance_length > 1.4
    assert check_drafter(result.drafter) == []
    for name in (
        "config.json",
        "provenance.json",
        "log.jsonl",
        "loss.png",
        "accuracy.png",
        "acceptance.png",
        "drafter/README.md",
    ):
        assert (tmp_path / "run" / name).stat().st_size > 0, name


def test_only_the_drafter_is_trained(target: Path, tmp_path: Path) -> None:
    """B85: target tables and the frozen head stay; optimizer state covers what is trained and nothing
    else."""
    result = go(target, tmp_path / "run", epochs=1)
    trained = lines(tmp_path / "run", "start")[0]["drafter"]["trainable"]
    assert "lm_head.weight" not in trained
    assert not [n for n in trained if "embed" in n]
    exported = load_file(result.drafter / "model.safetensors")
    ids = torch.arange(len(exported["d2t"])) + exported["d2t"] if "d2t" in exported else slice(None)
    from specdec_tap.target import load_target

    assert torch.equal(exported["lm_head.weight"], load_target(target).head.torch()[ids].bfloat16())
    tensors, _ = checkpoint.read(checkpoint.newest(tmp_path / "run" / "checkpoints")[0])
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    moments = sum(t.numel() for n, t in tensors.items() if n.startswith("optimizer.") and t.ndim)
    matrices = sum(weights[n].numel() for n in trained if weights[n].ndim == 2)
    vectors = sum(weights[n].numel() for n in trained if weights[n].ndim == 1)
    assert moments == matrices + 2 * vectors


def test_trained_head_moves(target: Path, tmp_path: Path) -> None:
    result = go(target, tmp_path / "run", epochs=1, train_lm_head=True, draft_vocab_size=40)
    from specdec_tap.target import load_target

    head = load_file(result.drafter / "model.safetensors")["lm_head.weight"]
    assert not torch.equal(head, load_target(target).head.torch().bfloat16())


def test_training_mode_survives_evaluation(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B59: drop-out is on again after each evaluation."""
    modes = []
    step = loop.train_step

    def watched(config, objective, *rest):
        modes.append(objective.model.training)
        return step(config, objective, *rest)

    monkeypatch.setattr(loop, "train_step", watched)
    go(target, tmp_path / "run", epochs=2, dropout=0.1, eval_epochs=0.3)
    assert len(lines(tmp_path / "run", "eval")) > 3
    assert all(modes)


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    tensors, _ = checkpoint.read(checkpoint.newest(out / "checkpoints")[0])
    return tensors


@pytest.mark.parametrize("settings", [
    {}, {"ema": 0.9, "noise": 0.1, "dropout": 0.1, "broken_keep": 0.5}, {"accumulate": 2},
    {"optimizer": "adamw"},
])  # fmt: skip
def test_resume_is_bit_identical(target: Path, tmp_path: Path, settings: dict) -> None:
    """B77: 13 steps, then on to the end, equals one run, optimizer, average and generators included."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    torch.manual_seed(0)
    go(target, straight, epochs=4, **settings)
    total = lines(straight, "train")[-1]["step"]
    half = total // 2 + 1
    # The schedule must not know that the run will stop: interrupt it as Ctrl-C does.
    interrupt_at(half, lambda: go(target, broken, epochs=4, **settings))
    assert checkpoint.read(checkpoint.newest(broken / "checkpoints")[0])[1]["state"]["step"] == half
    go(target, broken, epochs=4, resume=True, **settings)
    want, got = weights_of(straight), weights_of(broken)
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor, got[name]), name
    once = {x["step"]: x["loss"] for x in lines(straight, "train")}
    twice = {x["step"]: x["loss"] for x in lines(broken, "train")}
    assert once == twice


def interrupt_at(step: int, call) -> None:
    """Press Ctrl-C while ``step`` runs."""
    original = loop.train_step

    def pressing(config, objective, *rest):
        state = rest[-3]
        if state.step + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(config, objective, *rest)

    loop.train_step = pressing
    try:
        assert call().interrupted
    finally:
        loop.train_step = original


def test_a_killed_process_resumes_from_its_last_checkpoint(target: Path, tmp_path: Path) -> None:
    """B77: SIGKILL loses at most the steps since the last checkpoint, and a torn file is ignored."""
    out = tmp_path / "run"
    context = multiprocessing.get_context("spawn")
    sys_path = [str(Path(__file__).parent), *sys.path]
    child = context.Process(target=_train_slowly, args=(sys_path, target, out))
    child.start()
    deadline = time.monotonic() + 60
    while len(checkpoint.newest(out / "checkpoints")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.kill()
    child.join()
    newest = checkpoint.newest(out / "checkpoints")[0]
    (out / "checkpoints" / ".step-000000999.safetensors.part").write_bytes(b"torn")
    reached = checkpoint.read(newest)[1]["state"]["step"]
    result = go(target, out, epochs=4, resume=True, save_interval=1e-6)
    assert result.state.step > reached
    assert not list((out / "checkpoints").glob("*.part"))
    straight = tmp_path / "straight"
    go(target, straight, epochs=4)
    for name, tensor in weights_of(straight).items():
        assert torch.equal(tensor, weights_of(out)[name]), name


def _train_slowly(sys_path: list[str], target: Path, out: Path) -> None:
    sys.path[:] = sys_path
    original = loop.train_step

    def slow(*args):
        time.sleep(0.1)
        return original(*args)

    loop.train_step = slow
    go(target, out, epochs=4, save_interval=1e-6)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(target, out, epochs=2, save_interval=1e-6)
    newest, before = checkpoint.newest(out / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:1000])
    result = go(target, out, epochs=2, resume=True)
    assert result.state.step > int(before.stem.removeprefix("step-"))


def test_resume_with_other_settings_is_refused(target: Path, tmp_path: Path) -> None:
    go(target, tmp_path / "run", epochs=1)
    with pytest.raises(
        InputError, match=r"was written with seed 0, now it is 5; resume with the same settings"
    ):
        go(target, tmp_path / "run", epochs=2, seed=5, resume=True)
    with pytest.raises(InputError, match=r"no checkpoint in .*nothing'; start without --resume"):
        go(target, tmp_path / "nothing", resume=True)


def test_a_used_run_folder_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").touch()
    with pytest.raises(InputError, match=r"is not empty; choose another --out, or go on with --resume"):
        run(TrainConfig(**SMALL), tmp_path / "no-shards", out=tmp_path / "run", live=True)


def test_non_finite_loss_stops_before_the_update_and_names_the_records(target: Path, tmp_path: Path) -> None:
    store = learnable_store(target, records=6)
    # Finite, but the target's logits are not: only the forward pass can notice.
    store[3]._final[:] = 3e38
    with pytest.raises(loop.DivergedError, match=r"loss is not finite at step 1; stopped.*s/1/3.*--lr"):
        go(target, tmp_path / "run", store=store, held_out=0.0, batch_tokens=4000)
    assert not checkpoint.newest(tmp_path / "run" / "checkpoints")


def test_records_without_answers_stop_before_the_first_step(target: Path, tmp_path: Path) -> None:
    """B57."""
    store = FakeStore(
        FakeRecord(range(5), [(0, 5, "prompt")], np.zeros((4, 3, 16)), np.zeros((4, 16)), id=f"s/1/{i}")
        for i in range(3)
    )
    with pytest.raises(InputError, match=r"0 supervised tokens.*0 of them generated"):
        go(target, tmp_path / "run", store=store)
    assert not (tmp_path / "run").exists()


def test_empty_shards_and_foreign_targets_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no captured record in 'shards'"):
        go(target, tmp_path / "run", store=FakeStore())

    class Deep(FakeStore):
        from types import SimpleNamespace

        header = SimpleNamespace(dtype="float32", aux_layer_ids=(2, 15, 27))

    with pytest.raises(InputError, match=r"hold states of layer 27, but the target in .* has 8 layers"):
        go(target, tmp_path / "run", store=Deep(learnable_store(target)))


def test_limits_end_a_run(target: Path, tmp_path: Path) -> None:
    assert go(target, tmp_path / "steps", max_steps=3).state.step == 3
    short = go(target, tmp_path / "time", time_limit=0.001)
    assert short.state.step == 1
    assert short.drafter.is_dir()
    stale = go(target, tmp_path / "stale", patience=1, lr=1e-9, epochs=50)
    assert stale.state.epoch < 10


def test_evaluation_of_the_average_is_what_is_exported(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = go(target, out, ema=0.8, epochs=3, draft_vocab_size=40)
    tensors, meta = checkpoint.read(checkpoint.newest(out / "checkpoints")[0])
    exported = load_file(result.drafter / "model.safetensors")
    assert meta["average_updates"] == result.state.step
    names = lines(out, "start")[0]["drafter"]["trainable"]
    if result.state.best_step == result.state.step:
        for i, name in enumerate(names):
            assert torch.equal(exported[name], tensors[f"average.{i}"].bfloat16()), name


def test_prompt_tokens_and_feature_loss_train(target: Path, tmp_path: Path) -> None:
    result = go(target, tmp_path / "run", prompt_weight=0.5, epochs=2)
    assert result.evaluation is not None
    assert go(target, tmp_path / "feature", feature_weight=1.0, epochs=2).evaluation is not None


def test_prompt_tokens_train_where_the_target_said_something_about_them(target: Path, tmp_path: Path) -> None:
    """Shards with final states everywhere train on prompts; the held-out numbers stay those of answers."""
    answers, everything = learnable_store(target), learnable_store(target)
    everything.header = SimpleNamespace(**vars(answers.header), final_scope="all")
    for record in everything:
        record.final_span = [(0, record.num_rows)]
    counts = {}
    for name, store in (("answers", answers), ("everything", everything)):
        go(target, tmp_path / name, store=store, epochs=1)
        first = lines(tmp_path / name, "start")[0]
        assert first["settings"]["prompt_weight"] == (1.0 if name == "everything" else 0.0)
        counts[name] = first["training"]["supervised_tokens"], first["held_out"]["supervised_tokens"]
    assert counts["everything"][0] > counts["answers"][0]
    assert counts["everything"][1] == counts["answers"][1]


def test_a_worse_last_evaluation_leaves_the_best_drafter(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the card has the numbers of the best one, and the license that was set."""
    lengths, exported = [1.5, 2.25, 1.25, 1.75], []
    drafter = tmp_path / "run" / "drafter"

    def worse_later(*_, **__) -> Evaluation:
        if drafter.is_dir():
            exported.append((drafter / "model.safetensors").read_bytes())
        length = lengths[min(len(exported), 3)]
        return Evaluation((1.0,), (3,), (4,), 4, (round(4 * length) - 4,), 4)

    monkeypatch.setattr("specdec_trainer.run.evaluate", worse_later)
    result = go(target, tmp_path / "run", epochs=4, license="apache-2.0", draft_vocab_size=40)
    evals = [x["simulated_acceptance_length"] for x in lines(tmp_path / "run", "eval")]
    assert evals == lengths
    best_step = lines(tmp_path / "run", "eval")[1]["step"]
    assert (result.state.best, result.state.best_step) == (2.25, best_step)
    # Seen at the third and fourth evaluation, and now: what the second one left.
    after = (drafter / "model.safetensors").read_bytes()
    assert exported[0] != exported[1] == exported[2] == after
    newest = weights_of(tmp_path / "run")
    assert not torch.equal(
        load_file(drafter / "model.safetensors")["fc.weight"].float(), newest["model.fc.weight"]
    )
    card = (drafter / "README.md").read_text()
    training = lines(tmp_path / "run", "start")[0]["training"]
    rows = next(x["tokens"] for x in lines(tmp_path / "run", "train") if x["step"] == best_step)
    for text in (
        "\nlicense: apache-2.0\n", "draft tokens) | 2.250 |", "Held-out accuracy by draft token | 0.750 |",
        f"| {training['records']:,} requests, {training['supervised_tokens']:,} supervised tokens |",
        f"| {best_step:,} steps, {rows:,} tokens, 3 TTT steps |",
    ):  # fmt: skip
        assert text in card, text


def test_a_card_without_a_license_says_that_one_must_be_chosen(target: Path, tmp_path: Path) -> None:
    result = go(target, tmp_path / "run", epochs=1)
    assert "\nlicense: other  # must be chosen" in (result.drafter / "README.md").read_text()
    with pytest.raises(ConfigError, match=r"license is 'a\\nb: c'; expected a name such as apache-2\.0"):
        TrainConfig(license="a\nb: c")


def test_config_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"ttt_steps is 0; .*lr is -1\.0; .*norm_before_fc and fc_norm"):
        TrainConfig(ttt_steps=0, lr=-1.0, norm_before_fc=True, fc_norm=True)


def test_log_lines_carry_what_the_dashboard_reads(target: Path, tmp_path: Path) -> None:
    go(target, tmp_path / "run", epochs=2)
    start, train = lines(tmp_path / "run", "start")[0], lines(tmp_path / "run", "train")[0]
    assert {"settings", "drafter", "training", "held_out"} <= start.keys()
    assert {"step", "epoch", "loss", "accuracy", "rows", "tokens", "tokens_per_s", "data_wait", "lr",
            "peak_rss_bytes"} <= train.keys()  # fmt: skip
    evals = lines(tmp_path / "run", "eval")
    assert [x["step"] for x in evals] == sorted({x["step"] for x in evals})
    assert {"loss", "accuracy", "simulated_acceptance_length", "simulated_acceptance_per_position"} <= evals[
        0
    ].keys()
    assert lines(tmp_path / "run", "end")[0]["best"] == max(x["simulated_acceptance_length"] for x in evals)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["epochs"] == 2


def test_loss_over_part_of_a_frozen_head_evaluates_over_all_of_it(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = go(target, out, loss_vocab_size=20, epochs=2)
    facts = lines(out, "start")[0]["drafter"]
    assert (facts["draft_vocab_size"], facts["loss_vocab_size"]) == (40, 20)
    assert load_file(result.drafter / "model.safetensors")["lm_head.weight"].shape[0] == 40
    trained = go(target, tmp_path / "head", loss_vocab_size=20, epochs=1, train_lm_head=True)
    assert trained.facts["loss_vocab_size"] == 40


def test_a_whole_head_is_trained_over_what_traffic_uses(target: Path, tmp_path: Path) -> None:
    def rows(**more) -> tuple[int, int]:
        facts = go(target, tmp_path / f"{len(more)}", algorithm="medusa", epochs=1, **more).facts
        return facts["draft_vocab_size"], facts["loss_vocab_size"]

    assert rows() == (40, 40)  # smaller than any automatic draft vocabulary
    assert rows(min_draft_vocab_size=4, max_draft_vocab_size=16) == (40, 16)
    assert rows(min_draft_vocab_size=4, max_draft_vocab_size=16, loss_vocab_size=20) == (40, 20)
