"""Metrics of retrieval: the top items of each user, and recall, NDCG, hit rate, precision and MRR of such lists."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono.embedding import Ragged
from unisono_models.training.distributed.object_collectives import validate_on_all_ranks

_NAMES = ("recall", "ndcg", "hit", "precision", "mrr")
_FRACTION_BITS = 52  # values are summed as integers with this many binary places, so that order and split do not matter
_LOW_BITS = 26  # the lower half is summed separately, which leaves room for 2**37 users


@torch.no_grad()
def top_items(
    users: Tensor, items: Tensor, *, k: int, seen: Ragged | None = None, tile: tuple[int, int] = (256, 8192)
) -> tuple[Tensor, Tensor]:
    """Find the `k` items with the highest dot product for each user, best first: their scores and indices, both (users, k).

    A score is a sum in float64, rounded to the dtype of the inputs, at least float32. Among equal scores the item of the lower
    index comes first. Both have the same bits for any tile, so for any split of the users over ranks.

    Args:
        users: (users, width), this rank's. Ranks do not communicate.
        items: (items, width), all items.
        seen: The indices of the items to leave out, a bag for each user. Where fewer than k items are left, scores end in -inf
            and indices in -1.
        tile: How many users and how many items are scored at a time.

    Example:
        >>> items = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> top_items(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), items, k=2, seen=Ragged.from_lists([[], [1]]))
        (tensor([[2., 2.],
                [0., 0.]]), tensor([[0, 2],
                [0, 2]]))
    """
    if problem := _top_items_error(users, items, k, seen, tile):
        raise ValueError(f"top_items: {problem}")
    dtype = _score_dtype(users, items)
    found = [(users.new_empty((0, k), dtype=dtype), users.new_empty((0, k), dtype=torch.int64))]
    longest = _largest_norm(items)
    with torch.autocast(users.device.type, enabled=False):
        for start in range(0, len(users), tile[0]):
            user_tile = users[start : start + tile[0]].to(dtype)
            bags = None
            if seen is not None:
                offsets = seen.offsets[start : start + tile[0] + 1]
                first, last = offsets[[0, -1]].tolist()
                bags = Ragged(seen.values[first:last], offsets - first)
            found.append(_top_of_tile(user_tile, items, longest, k, bags, tile[1]))
    scores, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scores, indices


def _top_items_error(users: object, items: object, k: object, seen: object, tile: object) -> str:
    for name, x in (("users", users), ("items", items)):
        if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            return f"{name}: expected floating point vectors of shape ({name}, width), got {got}"
    assert isinstance(users, Tensor) and isinstance(items, Tensor)
    if users.shape[1] != items.shape[1] or users.device != items.device:
        both = [f"{tuple(x.shape)} on {x.device}" for x in (users, items)]
        return f"users and items must be of one width on one device, got {both[0]} and {both[1]}"
    if not isinstance(k, int) or k < 1:
        return f"k={k!r} must be a positive number"
    if not isinstance(tile, tuple) or len(tile) != 2 or not all(isinstance(step, int) and step > 0 for step in tile):
        return f"tile={tile!r} must be two positive numbers, of users and of items"
    if not _largest_norm(users) * _largest_norm(items) < torch.finfo(_score_dtype(users, items)).max:
        return "users or items are not finite, or so large that their products are not"
    return "" if seen is None else _bags_error("seen", seen, len(users), users.device, len(items))


def _score_dtype(users: Tensor, items: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(users.dtype, items.dtype), torch.float32)


def _largest_norm(x: Tensor) -> float:
    """The largest norm of a row; NaN or infinite if a number is NaN or infinite."""
    longest = x.new_zeros((), dtype=torch.float64)
    for start in range(0, len(x), 8192):  # in pieces: they are widened to float64
        norms = torch.linalg.vector_norm(x[start : start + 8192], dim=1, dtype=torch.float64)
        longest = torch.maximum(longest, norms.amax())
    return float(longest)


def _top_of_tile(users: Tensor, items: Tensor, longest: float, k: int, seen: Ragged | None, step: int) -> tuple[Tensor, Tensor]:
    """top_items for one tile of users, `step` items at a time. `longest` is the largest norm of an item.

    A matmul rounds the same product differently in a tile of another shape, so it would break ties by the tile. Here it only
    chooses candidates: the items that may be among the k best, given the largest error it can make. These few are scored
    again in float64, one product after the other, which does not depend on a shape.
    """
    limits, width = torch.finfo(users.dtype), users.shape[1]
    on_cpu = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    settings = {torch.backends.cuda.matmul.fp32_precision, on_cpu}
    rough_dtype = torch.float64 if settings & {"tf32", "bf16"} else users.dtype
    norms = torch.linalg.vector_norm(users, dim=1, keepdim=True, dtype=torch.float64)
    slack = (norms * (longest * (width + 4) * limits.eps) + width * limits.tiny).to(users.dtype)
    no_item = len(items)
    scores = users.new_full((len(users), k), -torch.inf)
    indices = torch.full_like(scores, no_item, dtype=torch.int64)
    for start in range(0, len(items), step):
        part = items[start : start + step]
        rough = (users.to(rough_dtype) @ part.to(rough_dtype).T).to(users.dtype)
        if seen is not None:
            inside = (seen.values >= start) & (seen.values < start + len(part))
            rows = torch.arange(len(users), device=users.device).repeat_interleave(seen.lengths())[inside]
            rough[rows, seen.values[inside] - start] = -torch.inf
        least = (scores[:, -1:] - slack).clamp_(min=limits.min)  # above the -inf of seen items
        candidates = int((rough >= least).sum(1, dtype=torch.int32).max())
        if candidates > k:  # as in the first tile, before which nothing was found
            least = torch.maximum(least, rough.topk(k).values[:, -1:] - 2 * slack)
            candidates = int((rough >= least).sum(1, dtype=torch.int32).max())
        if candidates:
            columns = torch.arange(len(part), device=users.device).expand_as(rough)
            few = 4 * candidates < len(part)  # False if most items are alike, as before training
            if few:
                rough, columns = rough.topk(candidates)
            fresh = _score(users, part, columns if few else None).masked_fill_(rough == -torch.inf, -torch.inf)
            columns = (columns + start).masked_fill_(rough == -torch.inf, no_item)
            scores, indices = _best(torch.cat([scores, fresh], 1), torch.cat([indices, columns], 1), k)
    return scores, indices.masked_fill_(indices == no_item, -1)


def _score(users: Tensor, items: Tensor, columns: Tensor | None) -> Tensor:
    """The dot product of each user with the items at its `columns`, or with all: the same bits for any columns."""
    total = users.new_zeros((len(users), len(items) if columns is None else columns.shape[1]), dtype=torch.float64)
    for user, item in zip(users.double().unbind(1), items.unbind(1), strict=True):
        total += user[:, None] * (item if columns is None else item[columns]).double()
    return total.to(users.dtype)


def _best(scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    indices, order = indices.sort(1)
    scores, by_score = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    return scores[:, :k], indices.gather(1, by_score[:, :k])


@torch.no_grad()
def ranking_metrics(indices: Tensor, relevant: Ragged, *, ks: Sequence[int] = (10,), group: Group = None) -> dict[str, float]:
    """Compute means over all users, of all ranks, that have a relevant item, as RecBole defines them.

    Every rank gets the same floats, with the same bits for any split and any order of the users.

    Args:
        indices: int64 (users, length), the items of each user, best first, and -1 where there is none, as top_items returns
            them. The length is the same on all ranks; the number of users may differ, or be 0.
        relevant: The indices of each user's relevant items, a bag for each. An item that is there twice counts once.

    Returns, for each k: "recall@k", the fraction of the relevant items that are among the first k; "ndcg@k", where an item
    found at position p counts 1 / log2(1 + p), divided by the best that a list of k could have; "hit@k", whether any was found;
    "precision@k", the fraction of the first k that are relevant; "mrr@k", 1 / position of the first found, or 0. And "users",
    their number. Without any user all but "users" are NaN.

    Raises: ValueError on all ranks if one has a bad call.

    Example:
        >>> lists = torch.tensor([[4, 2, 7], [1, 3, 5]])
        >>> ranking_metrics(lists, Ragged.from_lists([[2, 9], []]), ks=(2,))["recall@2"]  # the second user has nothing to find
        0.5
    """
    problem = _validation_error(indices, relevant, ks)
    same = "" if problem else f"ks={tuple(ks)}, lists of {indices.shape[1]} on {indices.device.type}"
    validate_on_all_ranks("ranking_metrics", problem, same=same, group=group)
    found, numbers = _find_relevant(indices, relevant)
    found, numbers = found[numbers > 0], numbers[numbers > 0]
    values = torch.stack([value for k in ks for value in _metrics_of_users(found[:, :k], numbers)], 1)
    fixed = (values * 2**_FRACTION_BITS).round().long()
    parts = [fixed >> _LOW_BITS, fixed & (2**_LOW_BITS - 1), torch.ones_like(fixed)]
    high, low, users = all_reduce(torch.stack([part.sum(0) for part in parts]), group=group).tolist()
    totals = [(a << _LOW_BITS) + b for a, b in zip(high, low, strict=True)]
    means = [total / (count << _FRACTION_BITS) if count else math.nan for total, count in zip(totals, users, strict=True)]
    keys = [f"{name}@{k}" for k in ks for name in _NAMES]
    return dict(zip(keys, means, strict=True)) | {"users": float(users[0])}


def _validation_error(indices: object, relevant: object, ks: object) -> str:
    if not isinstance(indices, Tensor) or indices.ndim != 2 or indices.dtype != torch.int64:
        got = f"{indices.dtype} {tuple(indices.shape)}" if isinstance(indices, Tensor) else type(indices).__name__
        return f"indices: expected int64 of shape (users, length), got {got}"
    if problem := _bags_error("relevant", relevant, len(indices), indices.device):
        return problem
    if not isinstance(ks, Sequence) or not ks or not all(isinstance(k, int) and 0 < k <= indices.shape[1] for k in ks):
        return f"ks={ks!r} must be numbers from 1 to the length of the lists, {indices.shape[1]}"
    return ""


def _bags_error(name: str, bags: object, users: int, device: torch.device, stop: int | None = None) -> str:
    """Check indices of items below `stop`, a bag for each user; return what is wrong, or the empty string."""
    if not isinstance(bags, Ragged):
        return f"{name}: expected a Ragged, got {type(bags).__name__}"
    values, offsets = bags.values, bags.offsets
    if offsets.shape != (users + 1,):
        return f"{name}: expected {users} bags, one for each user, got offsets of shape {tuple(offsets.shape)}"
    if values.device != device or offsets.device != device:
        return f"{name}: values on {values.device} and offsets on {offsets.device}, the rest is on {device}"
    if offsets[0] != 0 or offsets[-1] != len(values) or bool((offsets.diff() < 0).any()):
        return f"{name}: offsets must ascend from 0 to the number of values, {len(values)}"
    if len(values) and (int(values.min()) < 0 or (stop is not None and int(values.max()) >= stop)):
        worst = int(values.min()) if int(values.min()) < 0 else int(values.max())
        return f"{name}: {worst} is not the index of an item; they go from 0{'' if stop is None else f' to {stop - 1}'}"
    return ""


def _find_relevant(indices: Tensor, relevant: Ragged) -> tuple[Tensor, Tensor]:
    """Which indices of each list are relevant, and how many different items are relevant to each user."""
    users = torch.arange(len(indices), device=indices.device)
    base = 1 + max([0, *(int(x.max()) for x in (indices, relevant.values) if x.numel())])
    keys = (users.repeat_interleave(relevant.lengths()) * base + relevant.values).unique()
    found = torch.isin(users[:, None] * base + indices, keys).logical_and_(indices >= 0)
    return found, torch.bincount(keys // base, minlength=len(indices))


def _metrics_of_users(found: Tensor, numbers: Tensor) -> list[Tensor]:
    """Each user's metrics at k, the width of `found`, in float64, in the order of _NAMES."""
    k, hits = found.shape[1], found.sum(1).double()
    positions = torch.arange(1, k + 1, device=found.device, dtype=torch.float64)
    gains = (positions + 1).log2().reciprocal()
    # cumsum on both sides adds in the same order, so that a perfect list has exactly 1.
    ideal = gains.cumsum(0)[numbers.clamp(max=k) - 1]
    ndcg = (found * gains).cumsum(1)[:, -1] / ideal
    return [hits / numbers, ndcg, (hits > 0).double(), hits / k, (found / positions).amax(1)]
