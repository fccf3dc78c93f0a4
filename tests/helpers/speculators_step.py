"""Run by the Python of speculators 0.9: its reader reads a data folder, its trainer trains an epoch on it.

``python speculators_step.py DATA TARGET OUT.json``. Everything but the device is its own: dataset, check,
alignment, packing, model, loss, optimizer, the loop of an epoch. Its trainer knows accelerators only, so the
device is replaced.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import speculators.train.trainer as their_trainer
import torch
from safetensors.torch import load_file
from speculators.data_generation.offline import check_hidden_states
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from transformers import AutoConfig

MAX_LEN = 256


def main(data: Path, target: str, out: Path) -> None:
    torch.manual_seed(0)
    dataset = ArrowDataset(MAX_LEN, datapath=str(data), on_missing="raise")
    for number in range(len(dataset)):
        states = load_file(data / "hidden_states" / f"hs_{number}.safetensors")
        check_hidden_states(states, dataset.data[number]["input_ids"].tolist())
    config = AutoConfig.from_pretrained(target)
    num_layers, vocab = config.num_hidden_layers, config.vocab_size
    config.num_hidden_layers = 1
    model = Eagle3DraftModel.from_training_args(
        config,
        t2d=torch.ones(vocab, dtype=torch.bool),
        d2t=torch.zeros(vocab, dtype=torch.int64),
        verifier_name_or_path=target,
        draft_vocab_size=vocab,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        target_layer_ids=[2, num_layers // 2, num_layers - 3],
        draft_attn_impl="sdpa",
        ttt_steps=2,
    )
    call, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=2, ttt_step_loss_decay=0.8
    )
    losses: list[float] = []
    forward = model.forward

    def recorded(*args, **kwargs):
        result = forward(*args, **kwargs)
        losses.append(float(result[1]))
        return result

    model.forward = recorded
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, collate_fn=CollateFn(MAX_LEN, config.hidden_size, preprocess=shift_batch)
    )
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        their_trainer.get_local_rank = lambda: "cpu"
        torch.accelerator.synchronize = lambda *_: None
        settings = their_trainer.TrainerConfig(
            lr=1e-2, num_epochs=3, save_path=folder, train_call_kwargs=call, scheduler_type="none"
        )
        trainer = their_trainer.Trainer(model, settings, loader)
        trainer.device_type = "cpu"
        for epoch in range(3):
            trainer.train_epoch(epoch)
    moved = [name for name, value in model.named_parameters() if not torch.equal(before[name], value)]
    first = dataset[0]
    facts = {
        "rows": len(dataset),
        "losses": losses,
        "moved": moved,
        "first_tokens": first["input_ids"].tolist(),
        "supervised": int(first["loss_mask"].sum()),
    }
    # Its own alignment and norm: what its teacher says at supervised rows, after its shift.
    sample = shift_batch(dict(first))
    final = model.verifier_norm(sample["verifier_last_hidden_states"].float())
    teacher = (final @ model.verifier_lm_head.weight.float().T).argmax(-1)
    rows = sample["loss_mask"].bool()
    # Row t holds token t + 1 and the state after it, which is the teacher of token t + 2.
    facts["teacher"] = teacher[rows].tolist()
    out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
