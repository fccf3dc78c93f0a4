"""The drafter of the real Kimi-K2 and K2.5, without storage: vLLM's loader takes its config and every tensor.

Both sides live on torch's meta device, where gigabytes cost nothing. vLLM is asked in a child process,
where its process groups and device defaults do no harm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from specdec_trainer.algorithms import ALGORITHMS  # noqa: E402
from specdec_trainer.build import draft_config  # noqa: E402
from specdec_trainer.config import TrainConfig, convert  # noqa: E402
from specdec_trainer.export import engine_config  # noqa: E402

from specdec_tap import plan  # noqa: E402
from specdec_tap.recipes import read_recipe  # noqa: E402

pytestmark = pytest.mark.e2e

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"

CHILD = """
import json, os, sys, tempfile
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry

target, drafter, tensors = sys.argv[1:4]
speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
config = EngineArgs(
    model=target, skip_tokenizer_init=True, max_model_len=4096, language_model_only=True,
    speculative_config=speculative, attention_backend=sys.argv[4] or None,
).create_engine_config()
store = "file://" + tempfile.mktemp()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, store, 0, "gloo")
    initialize_model_parallel(1, 1)
    torch.set_default_dtype(torch.bfloat16)
    draft = config.speculative_config.draft_model_config
    kind = ModelRegistry.models[draft.architectures[0]].load_model_cls()
    with torch.device("meta"):
        model = kind(vllm_config=config, prefix="draft")
loaded = set()
def counting(name, loader):
    def load(parameter, *args, **kwargs):
        loaded.add(name)
        return loader(parameter, *args, **kwargs)
    return load
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
for name, parameter in model.named_parameters():
    loader = getattr(parameter, "weight_loader", default_weight_loader)
    try:
        parameter.weight_loader = counting(name, loader)
    except AttributeError:  # vLLM's own parameter classes keep theirs in a private attribute
        parameter._weight_loader = counting(name, loader)
shapes = json.loads(open(tensors).read())
model.load_weights(
    (name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
    for name, (shape, dtype) in shapes.items()
)
print("RESULT " + json.dumps({
    "class": type(model).__name__,
    "architecture": draft.architectures[0],
    "latent": any("MLA" in type(module).__name__ for module in model.modules()),
    "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
    "loaded": sorted(loaded),
    "aux": list(draft.hf_config.eagle_aux_hidden_state_layer_ids),
}))
"""


def ask_vllm(folder: Path, target: dict, drafter: dict, tensors: dict, backend: str) -> dict:
    for name, config in (("target", target), ("drafter", drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "tensors.json").write_text(json.dumps(tensors))
    (folder / "child.py").write_text(CHILD)
    done = subprocess.run(
        [sys.executable, "child.py", "target", "drafter", "tensors.json", backend],
        cwd=folder,
        env={**os.environ, "TRITON_BACKENDS_IN_TREE": "1", "SPECDEC_TAP": "off", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    answer = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answer, done.stdout[-3000:] + done.stderr[-4000:]
    return json.loads(answer[0].removeprefix("RESULT "))


@pytest.mark.parametrize("layer", ["kimik2", "llama"])
@pytest.mark.parametrize("recipe", ["kimi-k2", pytest.param("kimi-k2.5", marks=pytest.mark.matrix)])
def test_vllm_s_loader_takes_every_tensor_of_the_full_size_drafter(
    recipe: str, layer: str, tmp_path: Path
) -> None:
    """B100, B110, B113, B116: own sizes, every weight loaded, fc as wide as three states of 7168."""
    file = RECIPES / f"{recipe}.yaml"
    target = plan.read_config(file)
    settings = TrainConfig(**{**convert(read_recipe(file).train, "recipe"), "layer": layer})
    ids = plan.default_aux_layer_ids(target.num_hidden_layers)
    draft = draft_config(settings, target, ids, settings.draft_vocab_size)
    config = engine_config(draft, "vllm", target=None, target_name=None, dtype=torch.bfloat16, draft_tokens=3)
    with torch.device("meta"):
        model = ALGORITHMS["eagle3"](draft)
    tensors = {name: (list(t.shape), "bfloat16") for name, t in model.engine_tensors().items()}
    assert tensors["fc.weight"][0] == [7168, 3 * 7168]
    backend = "CPU_MLA" if layer == "kimik2" else ""
    answer = ask_vllm(tmp_path, dict(target.config), config, tensors, backend)
    assert answer["aux"] == [2, 30, 58]
    assert answer["latent"] == (layer == "kimik2")
    # The embedding is the target's; everything else came from our tensors, and nothing of ours is left over.
    missing = set(answer["parameters"]) - set(answer["loaded"])
    assert missing == {"model.embed_tokens.weight"}
    count = sum(
        torch.Size(shape).numel() for name, shape in answer["parameters"].items() if name not in missing
    )
    assert count == sum(torch.Size(shape).numel() for shape, _ in tensors.values())
