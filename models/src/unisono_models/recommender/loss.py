"""TrainingModule: a model and its loss over the global batch, in one module for DDP to wrap."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.collectives import global_mean
from unisono.collectives.groups import resolve_group
from unisono.contrastive import clip_loss
from unisono.embedding import exclude_from_ddp, sharded_parameters
from unisono_models.recommender.config import Config
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.dataset import Datasets
from unisono_models.recommender.model.click_model import ClickModel, table_width
from unisono_models.recommender.model.tables import EmbeddingTables
from unisono_models.recommender.model.two_tower import TwoTower
from unisono_models.training.errors import UserError
from unisono_models.training.phases import phase
from unisono_models.training.randomness import dropout_keys, replace_dropout, use_dropout_keys


class TrainingModule(nn.Module):
    """A model and its loss: binary cross entropy for a ClickModel, softmax over the items of the global batch for a TwoTower.

    Args:
        l2: For a ClickModel. Half of it times the sum of the squared embeddings of each row is added to the loss.
        log_q: For a TwoTower: the logarithm of the frequency of each item in the training data, by its row in the table.
    """

    def __init__(self, model: ClickModel | TwoTower, *, seed: int, l2: float = 0.0, log_q: Tensor | None = None) -> None:
        super().__init__()
        self.model, self.seed, self.l2 = model, seed, l2
        self.log_q = log_q  # not a buffer: it comes from the data, and DDP would broadcast it in every step

    def forward(self, batch: Batch, *, step: int, frozen_tables: bool = False) -> dict[str, Tensor]:
        """Compute the losses of a batch by name: the same on every rank. "loss" is the one to minimise."""
        with use_dropout_keys(dropout_keys(self.seed, step, batch.index)):
            if isinstance(self.model, ClickModel):
                return self._click_losses(self.model, batch, frozen_tables)
            return self._retrieval_losses(self.model, batch, frozen_tables)

    def _click_losses(self, model: ClickModel, batch: Batch, frozen_tables: bool) -> dict[str, Tensor]:
        fields = model.embed(batch, frozen_tables=frozen_tables)
        logits = _at_least_float32(model.score(fields, batch.numbers))
        log_loss = global_mean(F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits), reduction="none"))
        if not self.l2:
            return {"loss": log_loss}
        squares = global_mean(_at_least_float32(fields).square().sum((1, 2)))
        return {"loss": log_loss + self.l2 / 2 * squares, "log_loss": log_loss}

    def _retrieval_losses(self, model: TwoTower, batch: Batch, frozen_tables: bool) -> dict[str, Tensor]:
        users, items = model(batch, frozen_tables=frozen_tables)
        ids = batch.ids[model.config.items[0]]
        assert self.log_q is not None and isinstance(ids, Tensor)
        log_q = model.config.log_q * self.log_q[ids]
        with phase("loss"):
            return {"loss": retrieval_loss(users, items, log_q, temperature=model.config.temperature, ids=ids)}

    def prefetch(self, batch: Batch) -> None:
        """Begin to look up the batch of the next call: see EmbeddingCollection.prefetch."""
        self.tables.prefetch(self.model.look_ups(batch))

    @property
    def tables(self) -> EmbeddingTables:
        return self.model.tables

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters outside of the tables."""
        tables = {id(parameter) for parameter in sharded_parameters(self).values()}
        yield from (parameter for parameter in self.parameters() if id(parameter) not in tables)


def retrieval_loss(users: Tensor, items: Tensor, log_q: Tensor, *, temperature: float, ids: Tensor) -> Tensor:
    """Softmax over the items of the global batch, each user against all of them: the same value on every rank.

    Args:
        users, items: (rows, dim).
        log_q: (rows,) the logarithm of each item's frequency. It is subtracted from the item's logit, because popular items
            are negatives more often (Yi et al. 2019).
        ids: (rows,) of the items. The same item in another row is not a negative.

    Backward: gradients for users and items that are right after averaging over ranks. All ranks must run it.
    """
    scale = 1 / temperature
    # One more column subtracts log_q: its product is 1 * -log_q / scale, and the loss multiplies by scale.
    ones = users.new_ones(len(users), 1)
    x = torch.cat([users, ones], 1)
    y = torch.cat([items, -log_q[:, None].to(items) / scale], 1)
    return clip_loss(x, y, scale, ids=ids, same_id="masked", direction="x_to_y")


def build_training_module(
    config: Config, datasets: Datasets, *, dtype: torch.dtype, device: torch.device, log_q: Tensor | None = None
) -> TrainingModule:
    """Build the model of the config with its initial weights: the same on every rank. All ranks call.

    log_q: of a two_tower. None counts the items of the training data.
    """
    towers = config.model.kind == "two_tower"
    features = tuple(feature for feature in datasets.features if feature.kind != "number")
    if towers:
        used = (*config.model.users, *config.model.items)
        features = tuple(feature for feature in features if feature.name in used)
    sample = datasets.sample
    tables = EmbeddingTables(
        features,
        width=config.model.dim if towers else table_width(config.model),
        init=config.model.init,
        config=config.tables,
        data=config.data,
        mapped=datasets.mapped,
        sample=None if sample is None else {feature.name: sample.ids[feature.name] for feature in features},
        batch=math.ceil(config.data.batch / resolve_group(None).size),
        dtype=dtype,
        device=device,
    )
    if towers:
        log_q = _item_log_frequencies(datasets, config).to(device, dtype) if log_q is None else log_q
        module = TrainingModule(TwoTower(config.model, tables), seed=config.run.seed, log_q=log_q)
    else:
        model = ClickModel(config.model, datasets.features, tables)
        module = TrainingModule(model, seed=config.run.seed, l2=config.tables.l2)
    replace_dropout(module)
    exclude_from_ddp(module)
    return module.to(device, dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _item_log_frequencies(datasets: Datasets, config: Config) -> Tensor:
    """The logarithm of each item's frequency, by its row. Items without a training row count as one: they are never used."""
    ratings = datasets.ratings
    assert ratings is not None
    if config.model.items[0] != ratings.item or config.model.users[0] != ratings.user:
        raise UserError(f"--model.users and --model.items: the first has to be {ratings.user} and {ratings.item}")
    items = ratings.items[datasets.rows_of(datasets.train)]
    counts = items.bincount(minlength=len(ratings.vocabularies[ratings.item])).clamp(min=1)
    return (counts / max(len(items), 1)).log()
