"""What is trained: a model and its loss over the global batch. One module, for DDP to wrap."""

from __future__ import annotations

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
from unisono_models.training.randomness import dropout_keys, replace_dropout, use_dropout_keys


class TrainingModule(nn.Module):
    """A model and its loss: cross entropy of clicks, or softmax over the items of the global batch.

    l2: of a ClickModel: half of it times the squares of a row's embeddings is added to the row's loss.
    log_q: of a TwoTower: for each row of the item table, the logarithm of how often it comes in training.
    """

    def __init__(self, model: ClickModel | TwoTower, *, seed: int, l2: float = 0.0, log_q: Tensor | None = None) -> None:
        super().__init__()
        self.model, self.seed, self.l2 = model, seed, l2
        self.log_q = log_q  # no buffer: it comes from the data, and DDP would send it around at each step

    def forward(self, batch: Batch, *, step: int, frozen_tables: bool = False) -> dict[str, Tensor]:
        """The losses of a batch by name, what is minimised as "loss": the same on every rank."""
        with use_dropout_keys(dropout_keys(self.seed, step, batch.index)):
            if isinstance(self.model, ClickModel):
                return self._click_losses(self.model, batch, frozen_tables)
            return self._retrieval_losses(self.model, batch, frozen_tables)

    def _click_losses(self, model: ClickModel, batch: Batch, frozen_tables: bool) -> dict[str, Tensor]:
        fields = model.embed(batch, frozen_tables=frozen_tables)
        logits = _wide(model.score(fields, batch.numbers))
        clicks = global_mean(F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits), reduction="none"))
        if not self.l2:
            return {"loss": clicks}
        return {"loss": clicks + self.l2 / 2 * global_mean(_wide(fields).square().sum((1, 2))), "log_loss": clicks}

    def _retrieval_losses(self, model: TwoTower, batch: Batch, frozen_tables: bool) -> dict[str, Tensor]:
        users, items = model(batch, frozen_tables=frozen_tables)
        ids = batch.ids[model.config.items[0]]
        assert self.log_q is not None and isinstance(ids, Tensor)
        log_q, temperature = model.config.log_q * self.log_q[ids], model.config.temperature
        return {"loss": retrieval_loss(users, items, log_q, temperature=temperature, ids=ids)}

    def prefetch(self, batch: Batch) -> None:
        """Begin with the batch that the next call will have: see EmbeddingCollection.prefetch."""
        self.tables.prefetch(self.model.look_ups(batch))

    @property
    def tables(self) -> EmbeddingTables:
        return self.model.tables

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """All that is not in a table."""
        tables = {id(parameter) for parameter in sharded_parameters(self).values()}
        yield from (parameter for parameter in self.parameters() if id(parameter) not in tables)


def build_training_module(config: Config, source: Datasets, *, dtype: torch.dtype, device: torch.device) -> TrainingModule:
    """The model that the config describes, with its first weights: the same on every rank. All ranks call."""
    kind, sample, ranks = config.model.kind, source.sample, resolve_group(None).size
    features = tuple(feature for feature in source.features if feature.kind != "number")
    if kind == "two_tower":
        wanted = (*config.model.users, *config.model.items)
        features = tuple(feature for feature in features if feature.name in wanted)
    tables = EmbeddingTables(
        features,
        width=config.model.dim if kind == "two_tower" else table_width(config.model),
        init=config.model.init,
        config=config.tables,
        data=config.data,
        mapped=source.mapped,
        sample=None if sample is None else {feature.name: sample.ids[feature.name] for feature in features},
        batch=math.ceil(config.data.batch / ranks),
        dtype=dtype,
        device=device,
    )
    if kind == "two_tower":
        model: ClickModel | TwoTower = TwoTower(config.model, tables)
        learner = TrainingModule(model, seed=config.run.seed, log_q=_log_frequencies(source, config).to(device, dtype))
    else:
        learner = TrainingModule(ClickModel(config.model, source.features, tables), seed=config.run.seed, l2=config.tables.l2)
    replace_dropout(learner)
    exclude_from_ddp(learner)
    return learner.to(device, dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _log_frequencies(source: Datasets, config: Config) -> Tensor:
    """For each row of the item table. An item that never comes is no negative either: any number will do."""
    if source.ratings is None:
        raise ValueError("model.kind=two_tower: needs users and items, so interactions in memory: atomic files")
    if config.model.items[0] != source.ratings.item or config.model.users[0] != source.ratings.user:
        raise ValueError(f"model.users and model.items: the first has to be {source.ratings.user} and {source.ratings.item}")
    ratings = source.ratings
    items = ratings.items[source.rows_of(source.train)]
    counts = items.bincount(minlength=len(ratings.vocabularies[ratings.item])).clamp(min=1)
    return (counts / max(len(items), 1)).log()


def retrieval_loss(users: Tensor, items: Tensor, log_q: Tensor, *, temperature: float, ids: Tensor) -> Tensor:
    """Softmax over the items of the global batch, each user against all of them: the same value on every rank.

    log_q: (rows,) the logarithm of how often each of the items comes, which is taken off its logit, for in-batch negatives
    are drawn by popularity (Yi et al. 2019). ids: of the items; the same item in another row is no negative.

    Backward: gradients for users and items, right once they are averaged over ranks. All ranks must run it.
    """
    scale = 1 / temperature
    # One column more does it: its products are 1 * -log_q / scale, and the loss scales them back.
    one = users.new_ones(len(users), 1)
    x, y = torch.cat([users, one], 1), torch.cat([items, -log_q[:, None].to(items) / scale], 1)
    return clip_loss(x, y, scale, ids=ids, same_id="masked", direction="x_to_y")
