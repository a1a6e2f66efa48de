"""What a run says about its data, on the terminal and in the report: nothing is left out or guessed without a line."""

from unisono_models.recommender.config import Config
from unisono_models.recommender.data.dataset import Datasets
from unisono_models.recommender.data.ratings import Ratings

FEW_ROWS = 1000
MANY_EPOCHS = 50
_SPLITS = {
    "rows": "at random",
    "per_user": "at random for each user",
    "time": "by time: the newest are for the test",
    "leave_one_out": "by leaving out the last two of each user",
}


def describe_data(config: Config, given: Config, datasets: Datasets) -> list[str]:
    """Describe the data in sentences.

    Args:
        config: The config of the run, completed by the data.
        given: The config as the user gave it: what it leaves empty was guessed.
    """
    ratings = datasets.ratings
    lines = _describe_splits(config, datasets)
    if ratings is None:
        return lines
    return [*_describe_ratings(config, given, datasets, ratings), *lines]


def _describe_ratings(config: Config, given: Config, datasets: Datasets, ratings: Ratings) -> list[str]:
    data, towers = config.data, config.model.retrieves
    users, items = len(ratings.users.unique()), len(ratings.items.unique())
    lines = [f"{ratings.path.name}: {len(ratings):,} ratings by {users:,} users of {items:,} items are used"]
    if datasets.left_out:
        good = datasets.left_out + datasets.outside_core + len(ratings)
        lines.append(f"--data.keep {data.keep!r} leaves out {datasets.left_out:,} of {good:,} ratings")
    if datasets.outside_core:
        lines.append(
            f"--data.k-core {data.k_core} leaves out {datasets.outside_core:,} ratings, by users or of items that have fewer"
        )
    if not (given.data.user and given.data.item):
        named = {"user": data.user, "item": data.item, "rating": data.label, "time": data.timestamp}
        lines.append("columns: " + ", ".join(f"{what} is {name!r}" for what, name in named.items() if name))
    if ratings.unused:
        unused = ", ".join(name for name in ratings.unused if name != data.timestamp)
        lines += [f"columns that are not used: {unused} (--data.features adds some)"] if unused else []
    if towers and data.label and not data.keep:
        low, high = float(ratings.values.min()), float(ratings.values.max())
        if low < high:
            high_ones = f"--data.keep '[{data.threshold:g},inf)' keeps the high ones"
            lines.append(f"every rating counts as liked, from {low:g} to {high:g}: {high_ones}")
    elif not towers:
        why = (
            ""
            if given.data.threshold is not None
            else f", the first rating above the mean of {float(ratings.values.mean()):.4g}"
        )
        rate = float(ratings.labels.double().mean())
        lines.append(
            f"a rating of at least {data.threshold:g} counts as liked{why} (--data.threshold): {rate:.1%} of the ratings"
        )
    if data.split == "leave_one_out" and not data.timestamp:
        lines.append("there is no column of times (--data.timestamp): the ratings that are left out were chosen at random")
    repeated = len(ratings) - len((ratings.users * len(ratings.vocabularies[ratings.item]) + ratings.items).unique())
    if repeated:
        lines.append(f"{repeated:,} ratings repeat a user and an item; they are used as they are")
    return lines


def _describe_splits(config: Config, datasets: Datasets) -> list[str]:
    train, valid, test = (split.rows for split in (datasets.train, datasets.valid, datasets.test))
    how = f", split {_SPLITS[config.data.split]}" if datasets.ratings is not None else ""
    lines = [f"{train:,} rows to train on, {valid:,} to validate, {test:,} to test{how}"]
    batch, steps = config.data.batch, config.run.steps
    epochs = steps / max(1, -(-train // batch))
    if batch > train:
        lines.append(f"--data.batch {batch:,} is larger than the data: each of the {steps:,} steps takes all {train:,} rows")
    if epochs > MANY_EPOCHS and datasets.ratings is not None and not config.evaluation.patience:
        lines.append(
            f"the run takes every row {epochs:,.0f} times, and may learn them by heart: --run.steps takes fewer, "
            "--evaluation.patience 3 stops when validation gets no better"
        )
    if 0 < test < FEW_ROWS:
        lines.append(f"the test has only {test:,} rows: its metrics are rough")
    if not test:
        lines.append("there are no rows to test with: the metrics of the test are missing (--data.parts)")
    return lines
