"""How well items are recommended: each user's best items, and how many of the right ones are among them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono.embedding import Ragged
from unisono_models.recommender.metrics.agreement import settle

_NAMES = ("recall", "ndcg", "hit", "precision", "mrr")
_BITS = 52  # after the point of each user's values: sums of them are exact, so neither order nor split matters
_LOW = 26  # of these, summed apart: room for 2**37 users


@torch.no_grad()
def top_items(
    users: Tensor, items: Tensor, *, k: int, seen: Ragged | None = None, tile: tuple[int, int] = (256, 8192)
) -> tuple[Tensor, Tensor]:
    """The `k` items of highest dot product for each user, best first: their scores and their places, both (users, k).

    `users` (users, width) are this rank's, `items` (items, width) are all there are; no rank waits for another. `seen`: the
    places of the items that are left out, a bag for each user. Where fewer than k are left, scores end in -inf and places
    in -1. `tile`: of how many users with how many items scores are held at a time.

    A score is a sum in float64, rounded to the dtype of the inputs, at least float32. Of items of the same score the one of
    the lower place comes first. Both are the same bits for any tile, so for any split of the users over ranks.

    Example:
        >>> items = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> top_items(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), items, k=2, seen=Ragged.from_lists([[], [1]]))
        (tensor([[2., 2.],
                [0., 0.]]), tensor([[0, 2],
                [0, 2]]))
    """
    if problem := _items_complaint(users, items, k, seen, tile):
        raise ValueError(f"top_items: {problem}")
    dtype = _dtype_of(users, items)
    found = [(users.new_empty((0, k), dtype=dtype), users.new_empty((0, k), dtype=torch.int64))]
    longest = _longest(items)
    with torch.autocast(users.device.type, enabled=False):
        for start in range(0, len(users), tile[0]):
            own, bags = users[start : start + tile[0]].to(dtype), None
            if seen is not None:
                first, *_, last = seen.offsets[start : start + tile[0] + 1].tolist()
                bags = Ragged(seen.values[first:last], seen.offsets[start : start + tile[0] + 1] - first)
            found.append(_top(own, items, longest, k, bags, tile[1]))
    scores, places = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scores, places


def _items_complaint(users: object, items: object, k: object, seen: object, tile: object) -> str:
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
    if not _longest(users) * _longest(items) < torch.finfo(_dtype_of(users, items)).max:
        return "users or items are not finite, or so large that their products are not"
    return "" if seen is None else bags_complaint("seen", seen, len(users), users.device, len(items))


def _dtype_of(users: Tensor, items: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(users.dtype, items.dtype), torch.float32)


def _longest(x: Tensor) -> float:
    """The largest norm of a row; NaN or infinite if a number is."""
    longest = x.new_zeros((), dtype=torch.float64)
    for start in range(0, len(x), 8192):  # not all at once, for they are widened
        norms = torch.linalg.vector_norm(x[start : start + 8192], dim=1, dtype=torch.float64)
        longest = torch.maximum(longest, norms.amax())
    return float(longest)


def _top(users: Tensor, items: Tensor, longest: float, k: int, seen: Ragged | None, step: int) -> tuple[Tensor, Tensor]:
    """top_items for one tile of users, `step` items at a time. `longest`: the largest norm of an item.

    A matmul rounds the same product differently in a tile of another shape, so it would break ties by the tile. It only
    chooses candidates here, which is what may be among the k best after the largest error it can make; these few are scored
    once more, in float64 and one product after the other, which does not depend on a shape.
    """
    limits, width = torch.finfo(users.dtype), users.shape[1]
    rough_dtype = users.dtype if torch.get_float32_matmul_precision() == "highest" else torch.float64
    norms = torch.linalg.vector_norm(users, dim=1, keepdim=True, dtype=torch.float64)
    slack = (norms * (longest * (width + 4) * limits.eps) + width * limits.tiny).to(users.dtype)
    nowhere = len(items)
    scores = users.new_full((len(users), k), -torch.inf)
    places = torch.full_like(scores, nowhere, dtype=torch.int64)
    for start in range(0, len(items), step):
        part = items[start : start + step]
        rough = (users.to(rough_dtype) @ part.to(rough_dtype).T).to(users.dtype)
        if seen is not None:
            inside = (seen.values >= start) & (seen.values < start + len(part))
            rows = torch.arange(len(users), device=users.device).repeat_interleave(seen.lengths())[inside]
            rough[rows, seen.values[inside] - start] = -torch.inf
        least = (scores[:, -1:] - slack).clamp_(min=limits.min)  # above what was seen
        candidates = int((rough >= least).sum(1, dtype=torch.int32).max())
        if candidates > k:  # as in the first tile, which has no better ones before it
            least = torch.maximum(least, rough.topk(k).values[:, -1:] - 2 * slack)
            candidates = int((rough >= least).sum(1, dtype=torch.int32).max())
        if candidates:
            columns = torch.arange(len(part), device=users.device).expand_as(rough)
            few = 4 * candidates < len(part)  # not if most items are alike, as before training: then all are scored, unsorted
            if few:
                rough, columns = rough.topk(candidates)
            fresh = _score(users, part, columns if few else None).masked_fill_(rough == -torch.inf, -torch.inf)
            columns = (columns + start).masked_fill_(rough == -torch.inf, nowhere)
            scores, places = _best(torch.cat([scores, fresh], 1), torch.cat([places, columns], 1), k)
    return scores, places.masked_fill_(places == nowhere, -1)


def _score(users: Tensor, items: Tensor, columns: Tensor | None) -> Tensor:
    """The dot product of each user with the items at its `columns`, or with all, with the same bits wherever they are."""
    total = users.new_zeros((len(users), len(items) if columns is None else columns.shape[1]), dtype=torch.float64)
    for user, item in zip(users.double().unbind(1), items.unbind(1), strict=True):
        total += user[:, None] * (item if columns is None else item[columns]).double()
    return total.to(users.dtype)


def _best(scores: Tensor, places: Tensor, k: int) -> tuple[Tensor, Tensor]:
    places, order = places.sort(1)
    scores, by_score = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    return scores[:, :k], places.gather(1, by_score[:, :k])


@torch.no_grad()
def ranking_metrics(places: Tensor, relevant: Ragged, *, ks: Sequence[int] = (10,), group: Group = None) -> dict[str, float]:
    """How good the users' lists of items are: means over the users of all ranks that have a relevant item.

    `places` (users, length): of the items, best first, -1 where there is none, as top_items gives them; the same length on all
    ranks. `relevant`: the places of the right items of each user, one bag for each; an item that is there twice counts once.
    Ranks may have different numbers of users, also none.

    Keys, for each k: "recall@k", the found among the first k by the number of relevant ones; "ndcg@k", by the best that any
    list of k could have, found ones counting 1 / log2(1 + place); "hit@k", whether any was found; "precision@k", the found by
    k; "mrr@k", 1 / place of the first found, or 0; and "users", their number. As RecBole defines them. Without any user all
    but the last are NaN. Every rank gets the same floats, the same bits for any split and any order of the users.

    Raises: ValueError on all ranks if one has a bad call.

    Example:
        >>> lists = torch.tensor([[4, 2, 7], [1, 3, 5]])
        >>> ranking_metrics(lists, Ragged.from_lists([[2, 9], []]), ks=(2,))["recall@2"]  # the second user has nothing to find
        0.5
    """
    problem = _complaint(places, relevant, ks)
    same = "" if problem else f"ks={tuple(ks)}, lists of {places.shape[1]} on {places.device.type}"
    settle("ranking_metrics", problem, rows=0 if problem else len(places), same=same, group=group)
    found, numbers = _find(places, relevant)
    found, numbers = found[numbers > 0], numbers[numbers > 0]
    values = torch.stack([value for k in ks for value in _measure(found[:, :k], numbers)], 1)
    fixed = (values * 2**_BITS).round().long()
    parts = [fixed >> _LOW, fixed & (2**_LOW - 1), torch.ones_like(fixed)]
    high, low, users = all_reduce(torch.stack([part.sum(0) for part in parts]), group=group).tolist()
    totals = [(a << _LOW) + b for a, b in zip(high, low, strict=True)]
    means = [total / (count << _BITS) if count else math.nan for total, count in zip(totals, users, strict=True)]
    keys = [f"{name}@{k}" for k in ks for name in _NAMES]
    return dict(zip(keys, means, strict=True)) | {"users": float(users[0])}


def _complaint(places: object, relevant: object, ks: object) -> str:
    if not isinstance(places, Tensor) or places.ndim != 2 or places.dtype != torch.int64:
        got = f"{places.dtype} {tuple(places.shape)}" if isinstance(places, Tensor) else type(places).__name__
        return f"places: expected int64 of shape (users, length), got {got}"
    if problem := bags_complaint("relevant", relevant, len(places), places.device):
        return problem
    if not isinstance(ks, Sequence) or not ks or not all(isinstance(k, int) and 0 < k <= places.shape[1] for k in ks):
        return f"ks={ks!r} must be numbers from 1 to the length of the lists, {places.shape[1]}"
    return ""


def bags_complaint(name: str, bags: object, users: int, device: torch.device, stop: int | None = None) -> str:
    """What is wrong with places of items below `stop`, a bag for each user, or nothing."""
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
        return f"{name}: {worst} is not the place of an item; they go from 0{'' if stop is None else f' to {stop - 1}'}"
    return ""


def _find(places: Tensor, relevant: Ragged) -> tuple[Tensor, Tensor]:
    """Which places of each list are relevant, and how many different items are relevant to each user."""
    users = torch.arange(len(places), device=places.device)
    base = 1 + max([0, *(int(x.max()) for x in (places, relevant.values) if x.numel())])
    keys = (users.repeat_interleave(relevant.lengths()) * base + relevant.values).unique()
    found = torch.isin(users[:, None] * base + places, keys).logical_and_(places >= 0)
    return found, torch.bincount(keys // base, minlength=len(places))


def _measure(found: Tensor, numbers: Tensor) -> list[Tensor]:
    """Each user's values at the k that `found` is cut to, in float64, in the order of _NAMES."""
    k, hits = found.shape[1], found.sum(1).double()
    places = torch.arange(1, k + 1, device=found.device, dtype=torch.float64)
    gains = (places + 1).log2().reciprocal()
    # cumsum on both sides, which adds one after the other: a perfect list has 1 exactly.
    ideal = gains.cumsum(0)[numbers.clamp(max=k) - 1]
    ndcg = (found * gains).cumsum(1)[:, -1] / ideal
    return [hits / numbers, ndcg, (hits > 0).double(), hits / k, (found / places).amax(1)]
