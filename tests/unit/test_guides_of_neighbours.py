"""Every command of the guides for people who come from another tool, with a tiny model and tiny dumps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.guides import GUIDES, commands
from helpers.tiny import make_llama

from specdec_tap import plan
from specdec_tap.cli import build_parser, main
from specdec_tap.recipes import read_recipe
from specdec_tap.shards import open_shards

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS, SEQUENCES, TOKENS = 8, 12, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("guides") / "MODEL", hidden_size=32, tied=False)


@pytest.fixture(scope="module")
def sequences(model: Path) -> list[tuple]:
    """``(ids [T], mask [T], residual states r_0 .. r_N, final state)`` of a few random token rows."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    before_norm: list = []
    loaded.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    out = []
    for seed in range(SEQUENCES):
        ids = torch.randint(3, 259, (TOKENS,), generator=torch.Generator().manual_seed(seed))
        mask = (torch.arange(TOKENS) >= 10).long()
        before_norm.clear()
        with torch.inference_mode():
            result = loaded.model(ids[None], output_hidden_states=True)
        residual = [h[0] for h in result.hidden_states[:-1]] + [before_norm[0]]
        out.append((ids, mask, residual, result.last_hidden_state[0]))
    return out


def dump_modelopt(folder: Path, sequences: list[tuple], layers: tuple[int, ...]) -> None:
    folder.mkdir()
    for number, (ids, mask, residual, final) in enumerate(sequences):
        data = {
            "input_ids": ids,
            "loss_mask": mask,
            "hidden_states": final,
            "aux_hidden_states": torch.cat([residual[i] for i in layers], dim=-1),
            "conversation_id": f"c{number}",
        }
        torch.save(data, folder / f"c{number}.pt")


def dump_specforge(folder: Path, sequences: list[tuple], layers: tuple[int, ...]) -> None:
    (folder / "rows_0-2000").mkdir(parents=True)
    for number, (ids, mask, residual, final) in enumerate(sequences):
        data = {
            "input_ids": ids,
            "loss_mask": mask,
            "hidden_state": final[None],
            "aux_hidden_state": torch.cat([residual[i] for i in layers], dim=-1)[None],
        }
        torch.save(data, folder / "rows_0-2000" / f"data_{number}.ckpt")


def dump_speculators(folder: Path, sequences: list[tuple], layers: tuple[int, ...]) -> None:
    datasets = pytest.importorskip("datasets")
    from safetensors.torch import save_file

    (folder / "hidden_states").mkdir(parents=True)
    rows = []
    for number, (ids, mask, residual, _) in enumerate(sequences):
        states = torch.stack([residual[i] for i in (*layers, LAYERS)], dim=1).contiguous()
        tensors = {"hidden_states": states, "token_ids": ids}
        save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")
        rows.append({"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)})
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "data"))


def run_guide(guide: str) -> list[list[str]]:
    """Run every command here; training is cut to two steps. Returns what was run."""
    done = []
    for command in commands(guide):
        words = shlex.split(command)
        assert words[0] == "specdec-tap", f"{guide}: no test knows how to run {command!r}"
        short = ["--max-steps", "2", "--batch-tokens", "256"] if words[1] == "train" else []
        assert main([*words[1:], *short]) == 0, command
        done.append(words[1:])
    return done


DUMPS: dict[str, Callable] = {
    "modelopt": dump_modelopt,
    "specforge": dump_specforge,
    "speculators": dump_speculators,
}


@pytest.mark.parametrize("tool", DUMPS)
def test_every_command_of_the_guide_works(tool: str, model, sequences, tmp_path: Path, monkeypatch) -> None:
    """The default layers first; then ids of the user's own, as the tool calls them."""
    (tmp_path / "MODEL").symlink_to(model)
    DUMPS[tool](tmp_path / "dump", sequences, (2, 4, 5))
    DUMPS[tool](tmp_path / "dump-other", sequences, (1, 3, 4))
    monkeypatch.chdir(tmp_path)
    done = run_guide(f"from-{tool}.md")
    with open_shards("shards") as store:
        assert store.header.aux_layer_ids == (2, 4, 5)
        assert len(store) == SEQUENCES
        found = torch.from_numpy(store[0].aux_float())
        name = store[0].meta.request_id
        truth = next(s for n, s in enumerate(sequences) if name.endswith(str(n)))
    wanted = torch.stack([truth[2][i][:-1].float() for i in (2, 4, 5)], dim=1)
    assert torch.equal(found, wanted)
    if any("shards-other" in words for words in done):
        with open_shards("shards-other") as store:
            assert store.header.aux_layer_ids == (1, 3, 4)
    note = json.loads(Path("dump-from-shards/specdec_tap_export.json").read_text())
    assert note["layer_ids"] == [i - (tool != "speculators") for i in (2, 4, 5)]


@pytest.mark.parametrize("guide", sorted(path.name for path in GUIDES.glob("*.md")))
def test_commands_of_guides_use_flags_that_exist(guide: str) -> None:
    """The guides that need vLLM are run by tests/e2e/test_guides.py; their flags are checked here too."""
    for command in commands(guide):
        words = [word for word in shlex.split(command) if not word.startswith("SPECDEC_TAP_")]
        if words[0] == "specdec-tap":
            build_parser(words[1]).parse_args(words[1:])
        else:
            assert words[0] in ("sbatch", "vllm", "export"), command


def test_the_costs_that_the_kimi_guide_names_are_computed() -> None:
    """What the guide says about disk and memory is what the plan says of the recipe."""
    recipe = read_recipe(GUIDES.parents[1] / "configs" / "recipes" / "kimi-k2.yaml")
    target = plan.read_config(recipe.path)
    capture = plan.plan_capture(target, **recipe.expect)
    training = plan.plan_training(target, plan.check_settings(recipe.train))
    text = (GUIDES / "kimi.md").read_text()
    assert f"about {capture.stored_bytes_per_token:,.0f} bytes a token" in text
    assert f"{capture.gb_per_hour:,.1f} GB an hour at {capture.tokens_per_s:,.0f} tokens/s" in text
    assert f"{training.total / 1e9:,.1f} GB of memory for each training process" in text


def test_every_guide_is_run_by_a_test() -> None:
    """A new guide needs a test that runs its commands."""
    tests = Path(__file__).parents[1]
    here = "".join(path.read_text() for path in tests.rglob("test_guides*.py"))
    for guide in GUIDES.glob("*.md"):
        run_here = guide.name.startswith("from-") and guide.stem.removeprefix("from-") in DUMPS
        assert run_here or f'"{guide.name}"' in here, f"{guide.name} is run by no test"
