"""A model of a few thousand parameters, with dropout in both towers, and a batch for it."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from unisono_models.clip.config import ClipConfig, ImageConfig, LossConfig, TextConfig
from unisono_models.clip.loss import ClipTrainingModule
from unisono_models.clip.model import Clip
from unisono_models.clip.model.tokenizer import CaptionTokenizer
from unisono_models.training.randomness import SampleDropout

CAPTIONS = ["red heart", "blue heart", "dog face", "cat face", "red heart", "flag of the town", "a dog with a red heart"]
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def small_config(**text) -> ClipConfig:
    image = ImageConfig("test_vit", {"img_size": 16, "patch_size": 8, "drop_path_rate": 0.3}, size=16)
    return ClipConfig(image, TextConfig(config=BERT, vocabulary=60, hidden=8, dropout=0.2, **text), width=8)


def small_tokenizer() -> CaptionTokenizer:
    """A tokenizer of whole words that is always the same."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word for text in CAPTIONS for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return CaptionTokenizer(tokenizer, tokens=16)


def small_training_module(loss: LossConfig, **text) -> ClipTrainingModule:
    torch.manual_seed(0)
    config = small_config(**text)
    module = ClipTrainingModule(Clip(config, small_tokenizer()), loss).double()
    assert sum(isinstance(layer, SampleDropout) for layer in module.modules()) >= 4
    return module


def small_batch(module: ClipTrainingModule, rows: slice, *, step: int = 0) -> dict:
    """Some rows of a global batch of seven, as BatchMaker makes it. Two of them have the same concept."""
    random = torch.Generator().manual_seed(1)
    images, views = torch.rand(2, 7, 3, 16, 16, generator=random, dtype=torch.float64)
    concepts, index = torch.tensor([3, 1, 2, 5, 3, 4, 9]), torch.tensor([40, 2, 31, 7, 11, 8, 5])
    text = module.clip.tokenizer(CAPTIONS[rows])
    if module.clip.config.text.frozen:
        with torch.no_grad():
            text = module.clip.text.encode(text)
    return {
        "images": images[rows],
        "views": views[rows],
        "text": text,
        "concepts": concepts[rows],
        "index": index[rows],
        "step": step,
        "seed": 5,
    }
