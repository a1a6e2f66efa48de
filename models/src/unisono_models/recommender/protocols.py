"""Protocols: which features and ratings of MovieLens the recipes use. One's own data has no protocol: all of it is used."""

from dataclasses import dataclass, replace

from unisono_models.recommender.config import Config
from unisono_models.recommender.data.dataset import Datasets
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.data.ratings import Ratings
from unisono_models.training.errors import UserError


@dataclass(frozen=True)
class Protocol:
    """What the fields of a config are if the command line leaves them empty."""

    features: tuple[str, ...]
    users: tuple[str, ...]
    items: tuple[str, ...]
    keep: str = "[0,3);(3,inf)"
    threshold: float = 4.0
    tower_keep: str = "[3,inf)"
    """The ratings that two_tower takes as positives."""
    tower_threshold: float = 3.0
    sequence_features: tuple[str, ...] = ("user_id", "item_id")
    sequence_k_core: int = 10
    """sasrec takes the ratings of two_tower, and of these the users and items with at least so many."""


PROTOCOLS = {
    # RecBole's context protocol, RecBole-GNN's general one for two_tower, and RecBole's sequential one for sasrec.
    "ml-1m": Protocol(
        features=("user_id", "item_id", "age:id", "gender", "occupation:id", "genre:ids", "release_year:id"),
        users=("user_id", "age", "gender", "occupation"),
        items=("item_id", "genre", "release_year"),
    ),
    "ml-100k": Protocol(
        features=("user_id", "item_id", "age", "gender", "occupation", "class:ids", "release_year"),
        users=("user_id", "age", "gender", "occupation"),
        items=("item_id", "class", "release_year"),
    ),
}


def apply_protocol(config: Config) -> Config:
    """Fill the empty fields of a config with the protocol of its dataset. Other data is left to `complete_config`."""
    if config.data.source not in PROTOCOLS:
        return config
    protocol = PROTOCOLS[config.data.source]
    towers, sequences = config.model.retrieves, config.model.kind == "sasrec"
    features = config.data.features or (protocol.sequence_features if sequences else protocol.features)
    names = {Feature.parse(text).name for text in features}
    threshold = protocol.tower_threshold if towers else protocol.threshold
    data = replace(
        config.data,
        features=features,
        user=config.data.user or "user_id",
        item=config.data.item or "item_id",
        label=config.data.label or "rating",
        timestamp=config.data.timestamp or "timestamp",
        keep=config.data.keep or (protocol.tower_keep if towers else protocol.keep),
        k_core=protocol.sequence_k_core if sequences and config.data.k_core is None else config.data.k_core,
        threshold=threshold if config.data.threshold is None else config.data.threshold,
    )
    if sequences:  # complete_config fills in the item
        return replace(config, data=data)
    model = replace(
        config.model,
        users=config.model.users or tuple(name for name in protocol.users if name in names),
        items=config.model.items or tuple(name for name in protocol.items if name in names),
    )
    return replace(config, data=data, model=model)


def complete_config(config: Config, datasets: Datasets) -> Config:
    """Fill the fields that only the data can tell: columns, features, threshold, and the features of the towers."""
    ratings, model = datasets.ratings, config.model
    if ratings is not None:
        sides: dict[str, tuple[str, ...]] = {"user": (ratings.user,), "item": (ratings.item,)}
        for feature in ratings.features:
            side = ratings.columns[feature.name][0]
            if side in sides and feature.kind != "number" and feature.name not in sides[side]:
                sides[side] = (*sides[side], feature.name)
        if model.kind == "sasrec":
            _check_sequences(config, ratings)
            model = replace(model, items=(ratings.item,))
        else:
            model = replace(model, users=model.users or sides["user"], items=model.items or sides["item"])
    return replace(config, data=datasets.config, model=model)


def _check_sequences(config: Config, ratings: Ratings) -> None:
    if config.model.users or config.model.items not in ((), (ratings.item,)):
        named = " ".join((*config.model.users, *config.model.items))
        raise UserError(
            f"--model.users and --model.items {named}: sasrec knows items by their ids alone, and users by their items"
        )
    if ratings.times is None:
        raise UserError(
            f"--data.timestamp: {ratings.path.name} has no column of times, and sasrec learns which item comes after which. "
            f"Name the column, or train two towers: two_tower --data.source {config.data.source}"
        )


def check_labels(config: Config, datasets: Datasets) -> None:
    """Check that the model has something to learn from the ratings that the config, as the user gave it, describes.

    Raises: UserError if a click model has ratings of one label only, or if a setting has no effect.
    """
    ratings = datasets.ratings
    if config.model.retrieves:
        kind = config.model.kind
        if ratings is None:
            raise UserError(
                f"--model.kind {kind} needs users and items, which click logs do not have. Train on ratings (--data.format "
                "ratings, or RecBole's atomic files), or choose another kind"
            )
        if config.data.threshold is not None and config.data.source not in PROTOCOLS and config.data.format != "atomic":
            raise UserError(
                f"--data.threshold {config.data.threshold:g}: {kind} has no use for it: every rating that is kept counts as "
                f"liked. Keep the high ones: --data.keep '[{config.data.threshold:g},inf)'"
            )
        return
    if ratings is None:
        given = {"threshold": config.data.threshold, "keep": config.data.keep or None, "k-core": config.data.k_core}
        for name, value in given.items():
            if value is not None:
                raise UserError(
                    f"--data.{name} {value}: click logs have labels of 0 and 1 instead of ratings. Leave the option out, or "
                    "train on ratings (--data.format ratings)"
                )
        return
    hint = f"train two towers, which learn from positives alone: two_tower --data.source {config.data.source}"
    if not datasets.config.label:
        raise UserError(
            f"--data.label: {ratings.path.name} has no column of ratings, and {config.model.kind} learns to tell what is liked "
            f"from what is not. Name the column, or {hint}"
        )
    rate = float(ratings.labels.double().mean())
    if rate in (0.0, 1.0):
        low, high = float(ratings.values.min()), float(ratings.values.max())
        which = "no rating counts" if rate == 0 else "all ratings count"
        raise UserError(
            f"--data.threshold {datasets.config.threshold:g}: {which} as liked: {datasets.config.label} goes from {low:g} to "
            f"{high:g}. "
            f"Choose a threshold in between, or {hint}"
        )
