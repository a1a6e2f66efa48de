"""The same model twice: ours, and open_clip's own with the same timm and transformers towers and the same weights."""

from __future__ import annotations

import re
import tempfile
from typing import Any, NamedTuple

import timm
import torch
import torch.distributed as dist
import transformers
from timm.models import register_model
from tokenizers import Tokenizer, models
from torch import Tensor, nn

from unisono_models.clip.config import ClipConfig, ImageConfig, TextConfig
from unisono_models.clip.model import Clip
from unisono_models.clip.model.tokenizer import CaptionTokenizer

WIDTH = 256  # of the space that both towers map to
PIXELS = 32
TOKENS = 8
VOCABULARY = 2000
# No dropout: open_clip draws masks from each rank's generator, ours by sample, so that the losses could not agree.
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CONVNEXT = ImageConfig("test_convnext", {"patch_size": 2}, size=PIXELS)
DESCRIPTION = (
    f"timm {CONVNEXT.model} {CONVNEXT.kwargs} at {PIXELS} pixels; BERT of {BERT['num_hidden_layers']} layers, width "
    f"{BERT['hidden_size']}, up to {TOKENS} tokens; both into {WIDTH} dimensions"
)
# Our parameter names on the left. A head is one linear layer, somewhere among layers without parameters.
OPEN_CLIP_NAMES = {
    r"clip\.image\.trunk\.": "visual.trunk.",
    r"clip\.image\.head\.(\d+\.)?": "visual.head.proj.",
    r"clip\.text\.trunk\.": "text.transformer.",
    r"clip\.text\.head\.(\d+\.)?": "text.proj.",
    r"pairs\.log_scale": "logit_scale",
    r"pairs\.bias": "logit_bias",
}


class Batch(NamedTuple):
    """One rank's share, in the form that each side's own data loader would give it."""

    images: Tensor  # in [0, 1]: our tower normalises them
    normalised: Tensor  # open_clip does that before the step
    tokens: Tensor  # padded with -1
    padded: Tensor  # padded with BERT's 0
    places: Tensor  # in the global batch

    @classmethod
    def make(cls, rows: int) -> Batch:
        """Draw images of one colour each and captions of 3 to 8 tokens. They differ between ranks."""
        generator = torch.Generator().manual_seed(rows * 100 + dist.get_rank())
        colours = torch.rand(rows, 3, 1, 1, generator=generator)
        images = (colours + torch.rand(rows, 3, PIXELS, PIXELS, generator=generator)) / 2
        tokens = torch.randint(1, VOCABULARY, (rows, TOKENS), generator=generator)
        lengths = torch.randint(3, TOKENS + 1, (rows, 1), generator=generator)
        lengths[0] = TOKENS
        missing = torch.arange(TOKENS) >= lengths
        places = torch.arange(rows) + rows * dist.get_rank()
        settings: Any = timm.get_pretrained_cfg(CONVNEXT.model)
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (settings.mean, settings.std))
        return cls(images, (images - mean) / std, tokens.masked_fill(missing, -1), tokens.masked_fill(missing, 0), places)


def make_clip() -> Clip:
    """Build ours, with the weights that all contenders start from."""
    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))  # only its size matters
    text = TextConfig(config=BERT, tokens=TOKENS)
    return Clip(ClipConfig(CONVNEXT, text, WIDTH), CaptionTokenizer(tokenizer, tokens=TOKENS))


def make_open_clip(log_scale: float, bias: float | None) -> nn.Module:
    """Build open_clip's CustomTextCLIP by its own classes, as its factory does."""
    from open_clip.model import CustomTextCLIP

    vision = {
        "timm_model_name": convnext_of_small_patches.__name__,
        "timm_pool": "avg",
        "timm_proj": "linear",
        "image_size": PIXELS,
    }
    with tempfile.TemporaryDirectory() as folder:  # open_clip reads the config of a text tower from a folder or the hub
        transformers.AutoConfig.for_model(**(BERT | {"vocab_size": VOCABULARY})).save_pretrained(folder)
        text = {
            "hf_model_name": folder,
            "hf_model_pretrained": False,
            "hf_pooler_type": "mean_pooler",
            "hf_proj_type": "linear",
        }
        model: nn.Module = CustomTextCLIP(
            WIDTH, vision, text, init_logit_scale=log_scale, init_logit_bias=bias, output_dict=True
        )
    weights = {open_clip_name(f"clip.{name}"): value for name, value in make_clip().named_parameters()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"logit_scale", "logit_bias"}:
        raise RuntimeError(f"open_clip's model differs from ours: it lacks {unexpected} and has {missing} in addition")
    return model


@register_model
def convnext_of_small_patches(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build the image tower by name alone: open_clip gives timm no other arguments."""
    from_create_model = {"pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
    kept = {key: value for key, value in options.items() if key not in from_create_model}
    model: nn.Module = timm.create_model(CONVNEXT.model, pretrained=pretrained, **CONVNEXT.kwargs, **kept)
    return model


def open_clip_name(name: str) -> str:
    """Return open_clip's name of one of our parameters."""
    for ours, theirs in OPEN_CLIP_NAMES.items():
        if found := re.match(ours, name):
            return theirs + name[found.end() :]
    return name
