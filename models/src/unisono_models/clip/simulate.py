"""The training of clip for the simulation: real towers and losses, and a batch without data."""

import torch
from torch import Tensor

from unisono_models.clip.config import Config
from unisono_models.clip.data.loader import BatchMaker
from unisono_models.clip.data.pairs import PairBatch
from unisono_models.clip.loss import ClipTrainingModule
from unisono_models.clip.model import Clip
from unisono_models.clip.model.tokenizer import placeholder_tokenizer
from unisono_models.clip.model.trunks import without_weights
from unisono_models.clip.optimizer import make_optimizer
from unisono_models.clip.train import train_step
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.parallel import parallelize, parameter_dtype
from unisono_models.training.phases import phase
from unisono_models.training.simulate.training import SimulatedTraining, draw_integers, largest_share


def build_training(config: Config, ranks: Ranks) -> SimulatedTraining:
    """Build the towers by their configs alone, and a step on this rank's share of the batch, as train.py does."""
    dtype, device = parameter_dtype(config.parallel), ranks.device
    model_config, vocabulary = without_weights(config.model)
    tokenizer = placeholder_tokenizer(vocabulary, tokens=config.model.text.tokens)
    module = ClipTrainingModule(Clip(model_config, tokenizer), config.loss).to(device, dtype)
    model = parallelize(module, config.parallel, ranks).train()
    optimizer = make_optimizer(module, config.optimizer)
    rows, image, text = largest_share(config.data.batch, ranks.world_size), config.model.image, config.model.text
    cached_images, cached_text = image.frozen and image.views > 0, text.frozen

    def image_features(index: Tensor, epoch: int) -> Tensor:
        return torch.zeros(len(index), module.clip.image.features, dtype=dtype, device=device)

    def prepare_text(captions: object) -> Tensor:
        if cached_text:
            return torch.zeros(rows, module.clip.text.features, dtype=dtype, device=device)
        lengths = torch.arange(rows)[:, None] % text.tokens + 1  # captions have different lengths, one of them the longest
        lengths[-1:] = text.tokens
        return torch.where(torch.arange(text.tokens) < lengths, draw_integers(0, vocabulary, rows, text.tokens), -1)

    size = (0, 0, 0) if cached_images else (3, image.size, image.size)
    pixels, numbers = torch.zeros(rows, *size, dtype=torch.uint8), torch.arange(rows)
    pairs = PairBatch(pixels, [""] * rows, concepts=numbers, index=numbers)
    batch_maker = BatchMaker(
        prepare_text,
        image_features if cached_images else None,
        config.augment,
        config.run.seed,
        device,
        dtype,
        config.loss.view_weight > 0,
    )

    def step() -> object:
        with phase("data"):
            batch = batch_maker.make(pairs, step=0, epoch=0)
        return train_step(model, module, optimizer, batch, config, ranks)

    notes = [f"every caption list has one of {text.tokens} tokens, the longest"] if not cached_text else []
    if cached_images or cached_text:
        notes.append("frozen towers are not run: their features are cached before training, in memory that is not counted")
    return SimulatedTraining(module, [optimizer], step, notes=tuple(notes))
