"""Weights of a package that carries them, into a model of timm."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from unisono_models.datasets.package_files import locate_package


def load_in_order(model: nn.Module, name: str) -> None:
    """Fill `model` from the one .pth or .safetensors file of package:NAME, tensor by tensor in order: their names differ.

    The number of tensors and every shape must agree. Nothing in the file is executed.
    """
    files = sorted(x for x in Path(locate_package(name)).rglob("*") if x.suffix in (".pth", ".safetensors"))
    if len(files) != 1:
        raise FileNotFoundError(f"{name}: expected one file of weights in the package, found {[x.name for x in files]}")
    if files[0].suffix == ".pth":
        theirs = torch.load(files[0], map_location="cpu", weights_only=True)
    else:
        from safetensors.torch import load_file

        theirs = load_file(files[0])
    ours = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    theirs = {k: v for k, v in theirs.items() if not k.endswith("num_batches_tracked")}
    if not 0 <= len(theirs) - len(ours) <= 2:  # what follows is the classifier, which a tower has not
        raise ValueError(f"{name}: {len(theirs)} tensors, and the model has {len(ours)}: they are not of the same kind")
    values = list(theirs.values())[: len(ours)]
    for (key, own), (other, value) in zip(ours.items(), theirs.items(), strict=False):
        if own.shape != value.shape:
            raise ValueError(f"{name}: {other} of shape {tuple(value.shape)} does not fit {key} of shape {tuple(own.shape)}")
    model.load_state_dict(dict(zip(ours, values, strict=True)), strict=False)
