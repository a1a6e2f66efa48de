"""retrieval_metrics: how well each side finds its partners among the rows of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unisono.collectives import Group, all_gather
from unisono.collectives.sizes import Sizes
from unisono.contrastive.tiled.columns import Columns, Exchange, exchange_columns
from unisono.contrastive.tiled.tiles import Span, TileIterator, TilePlan, fill_diagonals, spans
from unisono.contrastive.validate import validate_inputs


def retrieval_metrics(
    x: Tensor,
    y: Tensor,
    ids: Tensor | None = None,
    *,
    ks: Sequence[int] = (1, 5, 10),
    sizes: Sizes = None,
    group: Group = None,
    exchange: Exchange = "auto",
    tile: int | None = None,
) -> dict[str, float]:
    """Compute recall@k, median rank and mean rank of all rows, from `x` to `y` and back: the same on every rank.

    Row i of `x` belongs to row i of `y`; both are (rows, width), and the caller normalises them if they should be. Ranks may
    have different numbers of rows, or none. Each row ranks all rows of the other side, on all ranks, by dot product. Its rank
    is that of its best positive: 1 + the number of other candidates with the same score or a higher one. So ties count against
    the model: if all features are equal, every row has the last rank. NaNs count against it, too.

    ids: all rows with the same id, on any rank, are positives; the best of them counts.
    ks: the k of each recall@k. sizes, exchange and tile are as in clip_loss: only one tile of scores is held at a time.

    Returns "x_to_y/recall@1" and so on for each k, "x_to_y/median_rank" (the mean of the middle two for an even number),
    "x_to_y/mean_rank", the same for "y_to_x", and "rows", the global number of rows. Without any row all others are NaN.

    Backward: none.

    Example:
        >>> import torch
        >>> from unisono.contrastive import retrieval_metrics
        >>> x, y = torch.eye(3), torch.eye(3)[[0, 2, 2]]  # on one rank, or with the three rows on any ranks
        >>> metrics = retrieval_metrics(x, y, ks=(1, 2))
        >>> metrics["x_to_y/recall@1"], metrics["x_to_y/recall@2"], metrics["x_to_y/median_rank"]
        (0.3333333333333333, 0.6666666666666666, 2.0)
    """
    with torch.no_grad():
        options = {"ks": tuple(ks) if isinstance(ks, Sequence) else ks, "exchange": exchange, "tile": tile}
        inputs = validate_inputs(
            "retrieval_metrics", x, y, ids=ids, sizes=sizes, group=group, options=options, problem=_ks_error(ks)
        )
        plan = inputs.tile_plan(log_sum_exps=(), same_id_sums=ids is not None)
        with torch.autocast(inputs.x.device.type, enabled=False):
            ranks = _positive_ranks(_Scorer(inputs.x, inputs.y, inputs.ids, plan), inputs.y)
        all_ranks = all_gather(ranks, sizes=inputs.sizes, group=group).cpu()
    metrics: dict[str, float] = {}
    for side, side_ranks in zip(("x_to_y", "y_to_x"), all_ranks.unbind(1), strict=True):
        ordered = side_ranks.sort().values.double()
        count = len(ordered)
        for k in ks:
            metrics[f"{side}/recall@{k}"] = float((ordered <= k).double().mean())
        metrics[f"{side}/median_rank"] = float(ordered[(count - 1) // 2 : count // 2 + 1].mean())
        metrics[f"{side}/mean_rank"] = float(ordered.mean())
    return metrics | {"rows": float(len(all_ranks))}


def _ks_error(ks: object) -> str:
    if not isinstance(ks, Sequence) or not all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in ks):
        return f"ks={ks!r} must be a sequence of positive integers"
    return ""


def _positive_ranks(scorer: _Scorer, y: Tensor) -> Tensor:
    """Return the rank of the best positive for each own row of x and of y, as (rows, 2)."""
    x = scorer.x
    slack_x = scorer.slack(x)
    slack_y = scorer.slack(y)
    own_ids = [] if scorer.row_ids is None else [scorer.row_ids]
    if scorer.row_ids is None:  # the partner is the only positive, and it is on this rank
        floor_x = floor_y = scorer.diagonal_products(y).to(scorer.dtype) - slack_x * slack_y
    else:
        floor_x = slack_x.new_full((x.shape[0],), -torch.inf)
        columns = scorer.exchange_columns(y, slack_y, *own_ids)
        for own_start, (all_y, all_slack, *all_ids) in columns:
            best = all_slack.new_full((all_y.shape[0],), -torch.inf)
            for rows, cols, features in scorer.spans(all_y):
                positive = scorer.positives(rows, cols, own_start, all_ids)
                if not positive.any():
                    continue  # true of most tiles if there are few positives: no scores are computed for them
                scores = scorer.logits(rows, features).addr_(slack_x[rows.slice], all_slack[cols.slice], alpha=-1)
                scores.masked_fill_(~positive, -torch.inf)
                floor_x[rows.slice] = torch.maximum(floor_x[rows.slice], scores.amax(1))
                best[cols.slice] = torch.maximum(best[cols.slice], scores.amax(0))
            columns.add(best, lambda parts: parts.amax(0))
        floor_y = columns.total()

    ranks_x = x.new_ones(x.shape[0], dtype=torch.int64)
    columns = scorer.exchange_columns(y, torch.stack([slack_y, floor_y], 1), *own_ids)
    for own_start, (all_y, slack_and_floor, *all_ids) in columns:
        ahead = x.new_zeros(all_y.shape[0], dtype=torch.int64)
        for rows, cols, features in scorer.spans(all_y):
            scores = scorer.logits(rows, features).addr_(slack_x[rows.slice], slack_and_floor[cols.slice, 0])
            positive = scorer.positives(rows, cols, own_start, all_ids)
            ranks_x[rows.slice] += _count_ahead(scores, floor_x[rows.slice].unsqueeze(1), positive, 1)
            ahead[cols.slice] += _count_ahead(scores, slack_and_floor[cols.slice, 1], positive, 0)
        columns.add(ahead)
    return torch.stack([ranks_x, columns.total() + 1], 1)


def _count_ahead(scores: Tensor, floor: Tensor, positive: Tensor, dim: int) -> Tensor:
    behind = (scores < floor).logical_or_(positive)  # not `ahead = scores >= floor`, which no NaN would pass
    return scores.shape[dim] - behind.sum(dim)


class _Scorer(TileIterator):
    """Tiles of scores, which are the logits of a scale of 1, and the rounding error of these scores.

    The same dot product may round differently in a tile of another shape, so the split over ranks would break ties. Scores
    are therefore compared with a slack: a positive at its lowest, all others at their highest. Scores that differ by less
    than rounding are a tie, on any split. The error of a sum of `width` terms is proportional to both norms. It was measured
    to be up to `width` / 100 eps where all terms are equal, as with a collapsed encoder.
    """

    def __init__(self, x: Tensor, y: Tensor, ids: Tensor | None, plan: TilePlan) -> None:
        super().__init__(x, torch.ones((), device="cpu"), ids, y.shape[0], plan)

    def exchange_columns(self, *tensors: Tensor) -> Columns:
        """Start to bring the `tensors` of all ranks, whose rows are columns of the scores."""
        assert self.plan.sizes is not None
        return exchange_columns(tensors, self.plan.exchange, self.plan.sizes, self.dtype.itemsize, self.plan.group)

    def spans(self, y: Tensor) -> Iterator[tuple[Span, Span, Tensor]]:
        """Yield (rows, columns, features of the columns) for each tile."""
        for columns in spans(y.shape[0], self.shape[1]):
            features = y[columns.slice].to(self.dtype)
            for rows in self.row_spans():
                yield rows, columns, features

    def slack(self, x: Tensor) -> Tensor:
        """One number per row; the slack of a score is the product of the numbers of its row and its column."""
        error = (8 + x.shape[1] / 32) * torch.finfo(self.dtype).eps
        parts = spans(x.shape[0], self.shape[0])
        norms = [torch.linalg.vector_norm(x[part.slice].to(self.dtype), dim=1) for part in parts]
        return torch.cat([x.new_empty(0, dtype=self.dtype), *norms]).mul_(error**0.5)

    def positives(self, rows: Span, cols: Span, own_start: int | None, all_ids: Sequence[Tensor]) -> Tensor:
        """Return the mask of the positive pairs of a tile."""
        if self.row_ids is not None:
            return self.row_ids[rows.slice].unsqueeze(1) == all_ids[0][cols.slice]
        pairs = self.x.new_zeros((rows.stop - rows.start, cols.stop - cols.start), dtype=torch.bool)
        if own_start is not None:
            fill_diagonals(pairs, rows, cols, Span(own_start, own_start + self.x.shape[0]), (0,), True)
        return pairs
