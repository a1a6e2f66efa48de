"""retrieval_metrics: how well each side finds the other among the rows of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unisono.collectives import Group, all_gather
from unisono.contrastive.blocks import Exchange, bring, choose
from unisono.contrastive.calls import options_complaint, settle
from unisono.contrastive.tiles import Scratch, Span, default_tile, exclude, spans


def retrieval_metrics(
    x: Tensor,
    y: Tensor,
    ids: Tensor | None = None,
    *,
    ks: Sequence[int] = (1, 5, 10),
    sizes: Sequence[int] | None = None,
    group: Group = None,
    exchange: Exchange = "auto",
    tile: int | None = None,
) -> dict[str, float]:
    """Recall@k and ranks of the right answer, from `x` to `y` and from `y` to `x`, over the global set: the same on every rank.

    Row i of `x` belongs to row i of `y`; both are (rows, width), normalised by the caller if they are to be. Ranks may have
    different numbers of rows, also none. Each row ranks the rows of the other side, of all ranks, by dot product; what counts
    is the place of its best positive: 1 + the number of other candidates that score as high or higher. Ties thus count
    against the model: one that gives all rows the same features has the last rank, not the first. So do NaNs.

    ids: all rows with the same id on any rank are positives; the best of them counts.
    ks: of the recalls. sizes, exchange, tile: as in clip_loss. No more than a tile of scores is held at a time.

    Keys: "x_to_y/recall@1" and so on for each k, "x_to_y/median_rank" (the mean of the middle two, if there are two),
    "x_to_y/mean_rank", the same with "y_to_x", and "rows", their global number. Without any row all but that are NaN.

    Backward: none.

    Example:
        >>> import torch
        >>> from unisono.contrastive import retrieval_metrics
        >>> x, y = torch.eye(3), torch.eye(3)[[0, 2, 2]]  # alone, or with the three rows on any ranks
        >>> found = retrieval_metrics(x, y, ks=(1, 2))
        >>> found["x_to_y/recall@1"], found["x_to_y/recall@2"], found["x_to_y/median_rank"]
        (0.3333333333333333, 0.6666666666666666, 2.0)
    """
    name = "retrieval_metrics"
    with torch.no_grad():
        problem = options_complaint(exchange, tile=tile) or _ks_complaint(ks)
        options = f"ks={ks if problem else tuple(ks)}, exchange={exchange}, tile={tile}, ids={ids is not None}"
        call = settle(name, x, y, ids=ids, sizes=sizes, group=group, same=options, problem=problem)
        lengths = call.sizes
        assert lengths is not None  # unknown only under torch.compile
        with torch.autocast(call.x.device.type, enabled=False):
            ranks = _ranks(call.x, call.y, ids, exchange, tile, lengths, group)
        all_ranks = all_gather(ranks, sizes=lengths, group=group).cpu()
    metrics: dict[str, float] = {}
    for side, found in zip(("x_to_y", "y_to_x"), all_ranks.unbind(1), strict=True):
        ordered = found.sort().values.double()
        count = len(ordered)
        for k in ks:
            metrics[f"{side}/recall@{k}"] = float((ordered <= k).double().mean())
        metrics[f"{side}/median_rank"] = float(ordered[(count - 1) // 2 : count // 2 + 1].mean())
        metrics[f"{side}/mean_rank"] = float(ordered.mean())
    return metrics | {"rows": float(sum(lengths))}


def _ks_complaint(ks: object) -> str:
    if not isinstance(ks, Sequence) or not all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in ks):
        return f"ks={ks!r} must be a sequence of positive integers"
    return ""


def _ranks(
    x: Tensor, y: Tensor, ids: Tensor | None, exchange: Exchange, tile: int | None, sizes: Sequence[int], group: Group
) -> Tensor:
    """The rank of the best positive for each own row of x and of y, as (rows, 2)."""
    board = _Scores(x, ids, tile)
    exchange = choose(exchange, sizes, y.shape[1], board.dtype.itemsize)
    slack_x, slack_y = board.slack(x), board.slack(y)
    keys = [] if board.ids is None else [board.ids]
    if board.ids is None:  # the partner is the only positive, and at hand
        partners = [(x[s].to(board.dtype) * y[s].to(board.dtype)).sum(1) for s in board.slices(x)]
        floor_x = floor_y = torch.cat([slack_x[:0], *partners]) - slack_x * slack_y
    else:
        floor_x = slack_x.new_full((x.shape[0],), -torch.inf)
        columns = bring([y, slack_y, *keys], exchange, sizes, group)
        for own, (all_y, all_slack, *all_keys) in columns:
            best = all_slack.new_full((all_y.shape[0],), -torch.inf)
            for rows, cols, features in board.tiles(all_y):
                positive = board.positives(rows, cols, own, all_keys)
                if not positive.any():
                    continue  # most tiles, if there are few positives: no scores are formed for them
                scores = board.scores(rows, features).addr_(slack_x[rows.slice], all_slack[cols.slice], alpha=-1)
                scores.masked_fill_(~positive, -torch.inf)
                floor_x[rows.slice] = torch.maximum(floor_x[rows.slice], scores.amax(1))
                best[cols.slice] = torch.maximum(best[cols.slice], scores.amax(0))
            columns.add(best, torch.maximum)
        floor_y = columns.total()

    ranks_x = x.new_ones(x.shape[0], dtype=torch.int64)
    columns = bring([y, torch.stack([slack_y, floor_y], 1), *keys], exchange, sizes, group)
    for own, (all_y, about, *all_keys) in columns:
        ahead = x.new_zeros(all_y.shape[0], dtype=torch.int64)
        for rows, cols, features in board.tiles(all_y):
            scores = board.scores(rows, features).addr_(slack_x[rows.slice], about[cols.slice, 0])
            positive = board.positives(rows, cols, own, all_keys)
            ranks_x[rows.slice] += _count_ahead(scores, floor_x[rows.slice].unsqueeze(1), positive, 1)
            ahead[cols.slice] += _count_ahead(scores, about[cols.slice, 1], positive, 0)
        columns.add(ahead)
    return torch.stack([ranks_x, columns.total() + 1], 1)


def _count_ahead(scores: Tensor, floor: Tensor, positive: Tensor, dim: int) -> Tensor:
    behind = (scores < floor).logical_or_(positive)  # not >=, by which a NaN would be ahead of nobody
    return scores.shape[dim] - behind.sum(dim)


class _Scores:
    """Tiles of scores between the own rows of x and any columns, and what may be wrong with them.

    The same dot product may round differently in a tile of another shape, so ties would be broken by the split over ranks.
    Scores are therefore taken with a slack: a positive at its lowest, all others at their highest. What differs by less than
    rounding is a tie, on any split. The error of a sum of `width` terms is in proportion to both norms; measured, up to
    `width` / 100 eps where all terms are equal, as a collapsed encoder may well have them.
    """

    def __init__(self, x: Tensor, ids: Tensor | None, tile: int | None) -> None:
        self.x, self.ids = x, None if ids is None else ids.to(x.device, torch.int64).contiguous()
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.step = (tile, tile) if tile else default_tile(x.device)
        self.scratch = Scratch(x, self.dtype)

    def slices(self, x: Tensor) -> list[slice]:
        return [rows.slice for rows in spans(x.shape[0], self.step[0])]

    def slack(self, x: Tensor) -> Tensor:
        """For each row a number whose product with that of a column is the slack of their score."""
        error = (8 + x.shape[1] / 32) * torch.finfo(self.dtype).eps
        norms = [torch.linalg.vector_norm(x[s].to(self.dtype), dim=1) for s in self.slices(x)]
        return torch.cat([x.new_empty(0, dtype=self.dtype), *norms]).mul_(error**0.5)

    def tiles(self, all_y: Tensor) -> Iterator[tuple[Span, Span, Tensor]]:
        """Rows, columns, and the columns' features."""
        for cols in spans(all_y.shape[0], self.step[1]):
            features = all_y[cols.slice].to(self.dtype)
            for rows in spans(self.x.shape[0], self.step[0]):
                yield rows, cols, features

    def scores(self, rows: Span, features: Tensor) -> Tensor:
        room = self.scratch.room("scores", (rows.stop - rows.start, features.shape[0]))
        return torch.mm(self.x[rows.slice].to(self.dtype), features.T, out=room)

    def positives(self, rows: Span, cols: Span, own: int | None, all_keys: Sequence[Tensor]) -> Tensor:
        """Which pairs of a tile belong together. `own`: where this rank's own columns begin, if they are here."""
        if self.ids is not None:
            return self.ids[rows.slice].unsqueeze(1) == all_keys[0][cols.slice]
        pairs = self.x.new_zeros((rows.stop - rows.start, cols.stop - cols.start), dtype=torch.bool)
        if own is not None:
            exclude(pairs, rows, cols, Span(own, own + self.x.shape[0]), (0,), True)
        return pairs
