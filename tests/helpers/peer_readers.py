"""Reads an export with the other tool's own dataset and saves what its trainer would be given.

``python peer_readers.py {modelopt,specforge} EXPORT OUT.safetensors``, in a Python that has the tool.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def modelopt(files: list[str]) -> dict[str, torch.Tensor]:
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    first = dataset[0]
    length = len(first["input_ids"])
    batch = EagleOfflineDataCollator(length)([first])
    outputs = batch["base_model_outputs"]
    return {
        "input_ids": batch["input_ids"][0],
        "labels": batch["labels"][0],
        "loss_mask": batch["loss_mask"][0],
        "aux": outputs["aux_hidden_states"][0],
        "final": outputs["base_model_hidden_states"][0],
        "prenorm": torch.tensor(outputs["base_hidden_prenorm"]),
    }


def specforge(files: list[str]) -> dict[str, torch.Tensor]:
    from specforge.data.preprocessing import OfflineEagle3Dataset

    first = OfflineEagle3Dataset(files, max_len=4096)[0]
    return {
        "input_ids": first["input_ids"][0],
        "loss_mask": first["loss_mask"][0],
        "aux": first["hidden_state"][0],
        "final": first["target"][0],
    }


if __name__ == "__main__":
    tool, export, out = sys.argv[1:]
    found = sorted(str(p) for p in Path(export).rglob("*") if p.suffix in (".pt", ".ckpt"))
    tensors = {"modelopt": modelopt, "specforge": specforge}[tool](found)
    save_file({name: value.contiguous() for name, value in tensors.items()}, out)
