"""TrainingModule: a model and its loss over the global batch, in one module for DDP to wrap."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unisono.collectives import all_gather, all_reduce, global_mean
from unisono.collectives.groups import resolve_group
from unisono.contrastive import clip_loss
from unisono.embedding import Ragged, exclude_from_ddp, sharded_parameters
from unisono_models.recommender.config import Config
from unisono_models.recommender.data.batch import Batch, Ids, take_slices
from unisono_models.recommender.data.dataset import Datasets
from unisono_models.recommender.model.build import Model, build_model
from unisono_models.recommender.model.click_model import ClickModel
from unisono_models.recommender.model.sasrec import SASRec
from unisono_models.recommender.model.tables import EmbeddingTables
from unisono_models.recommender.model.two_tower import TwoTower
from unisono_models.training.errors import UserError
from unisono_models.training.phases import phase
from unisono_models.training.randomness import dropout_keys, replace_dropout, use_dropout_keys

_TILE = 1 << 19  # logits that are computed at a time
_KEPT = 1 << 25  # logits that are kept for the backward


class TrainingModule(nn.Module):
    """A model and its loss: binary cross entropy for a ClickModel, softmax over the items of the global batch for a TwoTower,
    softmax over all items for a SASRec.

    Args:
        l2: For a ClickModel. Half of it times the sum of the squared embeddings of each row is added to the loss.
        log_q: For a TwoTower: the logarithm of the frequency of each item in the training data, by its row in the table.
        items: For a SASRec: the rows of all items in the table, ascending.
    """

    def __init__(
        self, model: Model, *, seed: int, l2: float = 0.0, log_q: Tensor | None = None, items: Tensor | None = None
    ) -> None:
        super().__init__()
        self.model, self.seed, self.l2 = model, seed, l2
        self.log_q, self.items = log_q, items  # no buffers: they come from the data, and DDP would broadcast them in every step

    def forward(self, batch: Batch, *, step: int, frozen_tables: bool = False) -> dict[str, Tensor]:
        """Compute the losses of a batch by name: the same on every rank. "loss" is the one to minimise."""
        with use_dropout_keys(dropout_keys(self.seed, step, batch.index)):
            if isinstance(self.model, ClickModel):
                return self._click_losses(self.model, batch, frozen_tables)
            if isinstance(self.model, SASRec):
                return self._next_item_losses(self.model, batch, frozen_tables)
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

    def _next_item_losses(self, model: SASRec, batch: Batch, frozen_tables: bool) -> dict[str, Tensor]:
        name = model.config.items[0]
        inputs, targets, share = self._split_windows(batch)
        # One look-up, so that the table's optimizer takes one step with the gradients of inputs and outputs.
        found = model.tables(self._look_ups(batch), frozen=frozen_tables)[name]
        vectors, items = found.split([len(inputs.values), len(share)])
        hidden = model.encode(vectors, inputs.lengths())
        with phase("loss"):
            return {"loss": next_item_loss(hidden, targets, items, ids=share)}

    def _split_windows(self, batch: Batch) -> tuple[Ragged, Tensor, Tensor]:
        """The inputs of each window, their targets end to end, and this rank's share of all items."""
        assert isinstance(self.model, SASRec) and self.items is not None
        windows = batch.ids[self.model.config.items[0]]
        assert isinstance(windows, Ragged)
        rows, lengths = torch.arange(len(batch), device=windows.values.device), windows.lengths() - 1
        inputs = take_slices(windows, rows, torch.zeros_like(rows), lengths)
        targets = take_slices(windows, rows, torch.ones_like(rows), lengths)
        ranks = resolve_group(None)
        return inputs, targets.values, self.items.tensor_split(ranks.size)[ranks.rank]

    def _look_ups(self, batch: Batch) -> dict[str, Ids]:
        if isinstance(self.model, SASRec):
            inputs, _, share = self._split_windows(batch)
            return {self.model.config.items[0]: torch.cat([inputs.values, share])}
        return self.model.look_ups(batch)

    def prefetch(self, batch: Batch) -> None:
        """Begin to look up the batch of the next call: see EmbeddingCollection.prefetch."""
        self.tables.prefetch(self._look_ups(batch))

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


def next_item_loss(hidden: Tensor, targets: Tensor, items: Tensor, *, ids: Tensor) -> Tensor:
    """Softmax over all items, for each position of all ranks: the same value on every rank.

    Each rank has a share of the items, and computes the logits of all positions with these. Of the logits, the ranks exchange
    three numbers for each position (Megatron-LM's vocabulary-parallel cross entropy, Shoeybi et al. 2019).

    Args:
        hidden: (positions, dim), of this rank. Ranks may have different numbers of them, or none.
        targets: (positions,) the id of the item that comes next. It has to be among the `ids` of one rank.
        items: (share, dim) the vectors of this rank's share of the items, perhaps none.
        ids: (share,) their ids, ascending.

    Backward: gradients for hidden and items that are right after averaging over ranks. All ranks must run it.

    Example:
        >>> items = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> next_item_loss(torch.eye(2), torch.tensor([5, 9]), items, ids=torch.tensor([5, 9]))
        tensor(0.1269)
    """
    hidden, targets = all_gather([hidden, targets])
    place = torch.searchsorted(ids, targets).clamp(max=max(len(ids) - 1, 0))
    if len(ids):
        chosen = _at_least_float32((hidden * F.embedding(place, items)).sum(1))
        # cross_entropy + chosen is the log-sum-exp, and much faster than torch.logsumexp.
        local = _cross_entropy(hidden, items, place) + chosen
        target_logits = torch.where(ids[place] == targets, chosen, 0.0)
    else:
        local = _at_least_float32(hidden @ items.T).logsumexp(1)  # -inf
        target_logits = torch.zeros_like(local)
    highest = all_reduce(local.detach(), "max")
    total, target_logits = all_reduce(torch.stack([(local - highest).exp(), target_logits])).unbind()
    return (highest + total.log() - target_logits).mean()


def _cross_entropy(hidden: Tensor, items: Tensor, place: Tensor) -> Tensor:
    """The cross entropy of each position over these items, some positions at a time, whose logits fit into a CPU's cache.

    Up to 128 MiB of logits are kept for the backward; more are computed again there.
    """

    def compute(some: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(_at_least_float32(some @ items.T), targets, reduction="none")

    rows = max(1, _TILE // len(items))
    tiles = zip(hidden.split(rows), place.split(rows), strict=True)
    if len(hidden) * len(items) <= _KEPT:
        return torch.cat([compute(*tile) for tile in tiles])
    return torch.cat([checkpoint(compute, *tile, use_reentrant=False) for tile in tiles])


def build_training_module(
    config: Config,
    datasets: Datasets,
    *,
    dtype: torch.dtype,
    device: torch.device,
    log_q: Tensor | None = None,
    items: Tensor | None = None,
) -> TrainingModule:
    """Build the model of the config with its initial weights: the same on every rank. All ranks call.

    log_q, items: see TrainingModule. None takes those of the data.
    """
    kind = config.model.kind
    rows = math.ceil(config.data.batch / resolve_group(None).size)
    model = build_model(
        config.model,
        datasets.features,
        tables=config.tables,
        data=config.data,
        mapped=datasets.mapped,
        sample=None if datasets.sample is None else datasets.sample.ids,
        batch=rows * config.model.length if kind == "sasrec" else rows,
        dtype=dtype,
        device=device,
    )
    if kind == "two_tower" and log_q is None:
        log_q = _item_log_frequencies(datasets, config).to(device, dtype)
    if kind == "sasrec" and items is None:
        items = datasets.items.to(device)
    module = TrainingModule(model, seed=config.run.seed, l2=config.tables.l2, log_q=log_q, items=items)
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
