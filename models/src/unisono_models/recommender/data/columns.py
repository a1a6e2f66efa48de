"""Which columns of a table are the user, the item, the rating and the time: those the config names, or by usual names."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unisono_models.recommender.config import USUAL_NAMES, DataConfig
from unisono_models.training.errors import UserError


@dataclass(frozen=True)
class RatingColumns:
    """The names of the columns. An empty name stands for a column that the table does not have."""

    user: str
    item: str
    label: str = ""
    timestamp: str = ""


def find_rating_columns(names: Sequence[str], config: DataConfig, *, where: str) -> RatingColumns:
    """Find the columns of a table of ratings.

    Args:
        names: All columns of the table.
        where: The name of its file, for errors.

    Raises: UserError if a column that the config names is not there, or if no column has a usual name of users or items.

    Example:
        >>> find_rating_columns(["movieId", "userId", "stars"], DataConfig(), where="ratings.csv")
        RatingColumns(user='userId', item='movieId', label='stars', timestamp='')
    """
    given = {"user": config.user, "item": config.item, "label": config.label, "timestamp": config.timestamp}
    found = {option: _find_column(names, option, name, where) for option, name in given.items()}
    chosen = [name for name in found.values() if name]
    if repeated := [name for name in chosen if chosen.count(name) > 1]:
        options = " and ".join(f"--data.{option}" for option, name in found.items() if name == repeated[0])
        raise UserError(f"{options} are both the column {repeated[0]!r} of {where}: name two different ones of {_list(names)}")
    return RatingColumns(**found)


def find_label(names: Sequence[str], config: DataConfig, *, where: str) -> str:
    """Find the column that a model predicts, in a table of clicks. Raises: UserError if there is none."""
    label = _find_column(names, "label", config.label, where)
    if not label:
        usual = ", ".join(USUAL_NAMES["label"])
        raise UserError(
            f"--data.label: {where} has no column with a usual name ({usual}). It has {_list(names)}. Name the column"
        )
    return label


def _find_column(names: Sequence[str], option: str, given: str, where: str) -> str:
    if given and given not in names:
        near = difflib.get_close_matches(given, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"--data.{option} {given}: {where} has no such column.{hint} It has {_list(names)}")
    found = given or _usual(names, option)
    if not found and option in ("user", "item"):
        usual = ", ".join(USUAL_NAMES[option])
        raise UserError(
            f"--data.{option}: {where} has no column with a usual name of {option}s ({usual}). It has {_list(names)}. "
            f"Name the column: --data.{option} NAME"
        )
    return found


def _usual(names: Sequence[str], option: str) -> str:
    """The column with the first of the usual names that there is, or the empty string. Case and punctuation do not count."""
    plain = {_plain(name): name for name in reversed(names)}
    return next((plain[_plain(usual)] for usual in USUAL_NAMES[option] if _plain(usual) in plain), "")


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
