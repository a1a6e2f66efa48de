"""What ranks tell each other, and that they fail together."""

from contextlib import nullcontext

import pytest
import torch.distributed as dist

from unisono.collectives.testing import RanksFailed
from unisono_models.training.distributed.object_collectives import (
    RanksError,
    all_gather_object,
    broadcast_object,
    raise_together,
)

VALUES = {"text": "❤ naïve", "list": [1, 2.5, None, True], "nested": {"a": {"b": []}}, "exact": 0.1 + 0.2}


def talks():
    rank, size = dist.get_rank(), dist.get_world_size()
    assert all_gather_object({"rank": rank, "pad": "x" * rank * 1000}) == [
        {"rank": r, "pad": "x" * r * 1000} for r in range(size)
    ]
    assert broadcast_object(VALUES if rank == 0 else "ignored") == VALUES


def fails_together(bad):
    rank = dist.get_rank()
    with nullcontext() if not bad else pytest.raises(RanksError) as raised, raise_together("reading"):
        if rank in bad:
            raise FileNotFoundError(f"no file for {'some' if rank else 'first'}")
    if not bad:
        return None
    assert (raised.value.__cause__ is not None) == (rank in bad)
    return str(raised.value)


def test_values_travel(ranks):
    for world in (1, 3):
        ranks(talks, world_size=world)
    assert all_gather_object(VALUES) == [VALUES] and broadcast_object(VALUES) == VALUES


def test_an_error_on_one_rank_is_everybodys(ranks):
    assert ranks(fails_together, [], world_size=3) == [None] * 3
    (text,) = set(ranks(fails_together, [1, 2], world_size=3))
    assert text == "reading: rank 1, 2: FileNotFoundError: no file for some"
    (text,) = set(ranks(fails_together, [0, 2], world_size=3))
    assert "rank 0: FileNotFoundError: no file for first" in text and "rank 2" in text


def test_alone_an_error_stays_what_it_is():
    with pytest.raises(KeyError), raise_together("reading"):
        raise KeyError("x")


def unserialisable():
    all_gather_object(object())


def test_what_json_cannot_say_is_refused(ranks):
    with pytest.raises(RanksFailed, match="not JSON serializable"):
        ranks(unserialisable, world_size=2)
