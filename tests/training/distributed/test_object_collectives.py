"""Small values between ranks, and errors that all ranks raise together."""

from contextlib import nullcontext

import pytest
import torch.distributed as dist

from unisono.collectives.testing import RanksFailed
from unisono_models.training.distributed.object_collectives import (
    RanksError,
    all_gather_object,
    broadcast_object,
    raise_together,
    validate_on_all_ranks,
)
from unisono_models.training.errors import UserError

VALUES = {"text": "❤ naïve", "list": [1, 2.5, None, True], "nested": {"a": {"b": []}}, "exact": 0.1 + 0.2}


def exchange():
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


def test_values_of_all_ranks_arrive(ranks):
    for world in (1, 3):
        ranks(exchange, world_size=world)
    assert all_gather_object(VALUES) == [VALUES] and broadcast_object(VALUES) == VALUES


def test_an_error_on_one_rank_is_raised_on_all(ranks):
    assert ranks(fails_together, [], world_size=3) == [None] * 3
    (text,) = set(ranks(fails_together, [1, 2], world_size=3))
    assert text == "reading: rank 1, 2: FileNotFoundError: no file for some"
    (text,) = set(ranks(fails_together, [0, 2], world_size=3))
    assert "rank 0: FileNotFoundError: no file for first" in text and "rank 2" in text


def test_without_other_ranks_an_error_is_raised_as_it_is():
    with pytest.raises(KeyError), raise_together("reading"):
        raise KeyError("x")


def mistakes_together(texts):
    rank = dist.get_rank()
    try:
        with raise_together("reading"):
            if isinstance(texts[rank], Exception):
                raise texts[rank]
            if texts[rank]:
                raise UserError(texts[rank])
    except (UserError, RanksError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_mistakes_of_the_user_stay_mistakes_on_all_ranks(ranks):
    for texts, expected in (
        (["--a 1: no", "--a 1: no"], "UserError: --a 1: no"),
        (["--a 1: no", ""], "UserError: --a 1: no"),  # rank 0 often works for all ranks
        (["", "--a 1: no"], "UserError: rank 1: --a 1: no"),
        (["no file x", "no file y"], "UserError: rank 0: no file x; rank 1: no file y"),
        (["no", KeyError("x")], "RanksError: reading: rank 0: no; rank 1: KeyError: 'x'"),
    ):
        assert ranks(mistakes_together, texts, world_size=2) == [expected] * 2


def validate(problems, descriptions):
    rank = dist.get_rank()
    try:
        return validate_on_all_ranks("auc", problems[rank], same=descriptions[rank], value=rank * 10)
    except ValueError as error:
        return str(error)


def test_arguments_are_validated_on_all_ranks(ranks):
    assert ranks(validate, ["", ""], ["float32", "float32"], world_size=2) == [[0, 10]] * 2
    assert ranks(validate, ["", "no rows"], ["float32", ""], world_size=2) == ["auc: rank 1: no rows"] * 2
    expected = "auc: this must be equal on all ranks: rank 0: float32; rank 1: float64"
    assert ranks(validate, ["", ""], ["float32", "float64"], world_size=2) == [expected] * 2


def unserialisable():
    all_gather_object(object())


def test_what_json_cannot_say_is_refused(ranks):
    with pytest.raises(RanksFailed, match="not JSON serializable"):
        ranks(unserialisable, world_size=2)
