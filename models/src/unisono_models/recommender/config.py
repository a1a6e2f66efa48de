"""The settings of the recommender. Every field is an option of the command line, and its docstring is the help text."""

from dataclasses import dataclass, field
from typing import Literal

from unisono_models.training.config import CheckpointConfig, ParallelConfig, RunConfig
from unisono_models.training.errors import UserError

USUAL_NAMES = {
    "user": ("user", "user_id", "uid", "customer", "customer_id", "member_id", "reviewer_id", "visitor_id", "account_id"),
    "item": (
        *(
            "item",
            "item_id",
            "iid",
            "movie",
            "movie_id",
            "product",
            "product_id",
            "book_id",
            "article_id",
            "track_id",
            "song_id",
        ),
        *("artist_id", "game_id", "recipe_id", "business_id", "content_id", "isbn", "asin", "parent_asin", "sku"),
    ),
    "label": ("rating", "ratings", "score", "stars", "overall", "label", "click", "clicked", "liked", "target", "value"),
    "timestamp": ("timestamp", "time", "ts", "date", "datetime", "unix_review_time", "created_at", "event_time", "rated_at"),
}
"""The usual names of columns. Upper case, spaces and punctuation do not count: userId, User ID and user_id are the same."""


@dataclass(frozen=True)
class DataConfig:
    """The data: ratings of items by users, or rows of clicks."""

    source: str = "ml-1m"
    """What to train on. Ratings: a table (.csv, .tsv or .txt with a header, also .gz; or .parquet), or RecBole's atomic files.
    Click logs that do not fit in memory: Criteo's TSV, or parquet with --data.features NAME:KIND:ROWS.
    A file, a folder, a pattern such as '/data/day_{0..22}', or the name of a dataset: ml-1m or ml-100k."""
    format: Literal["auto", "ratings", "atomic", "criteo", "parquet"] = "auto"
    """The format of the files: ratings is a table of ratings, parquet is click logs.
    auto decides by the suffix, the columns and the features."""
    user: str = ""
    """The column of the user. Empty takes the first of these that there is: user, user_id, uid, customer, customer_id,
    member_id, reviewer_id, visitor_id, account_id. Upper case, spaces and punctuation do not count."""
    item: str = ""
    """The column of the item. Empty takes the first of these that there is: item, item_id, iid, movie, movie_id, product,
    product_id, book_id, article_id, track_id, song_id, artist_id, game_id, recipe_id, business_id, content_id, isbn, asin,
    parent_asin, sku."""
    label: str = ""
    """The column of the rating or click, which the model predicts. Empty takes the first of these that there is: rating,
    ratings, score, stars, overall, label, click, clicked, liked, target, value. two_tower and sasrec need none."""
    timestamp: str = ""
    """The column of the time, as numbers or ISO dates, for sasrec and for --data.split time and leave_one_out. Empty takes the
    first of these that there is: timestamp, time, ts, date, datetime, unix_review_time, created_at, event_time, rated_at."""
    features: tuple[str, ...] = ()
    """The columns that the model takes as inputs: NAME:id, NAME:ids for a bag of ids, or NAME:number.
    Empty takes the user and the item; with MovieLens, those of the recipe's protocol.
    A plain NAME takes its kind from the data. Click logs need NAME:id:ROWS, the number of rows of the table.
    Numbers are used as they are: scale them beforehand. Criteo's become log(x + 3)."""
    keep: str = ""
    """Use only the ratings that lie in one of these intervals, such as '[0,3);(3,inf)'. Empty uses all of them; with MovieLens,
    those of the recipe's protocol. Not for click logs, which are used whole."""
    k_core: int | None = None
    """Leave out users and items with fewer ratings than this, until all that are left have as many. None leaves out none; with
    MovieLens, those of the recipe's protocol. Not for click logs."""
    threshold: float | None = None
    """A rating of at least this counts as liked (1), others as not liked (0). None takes the first rating above the mean.
    two_tower and sasrec count every rating that is kept as liked. Click logs have labels of 0 and 1 already."""
    split: Literal["rows", "per_user", "time", "leave_one_out"] = "rows"
    """How ratings are split into training, validation and test. rows: at random. per_user: at random among the rows of each
    user. time: the oldest for training, the newest for the test. leave_one_out: the last rating of each user for the test,
    the one before it for validation; without a column of times, two random ones. Click logs are split by chunks."""
    parts: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """The fractions for training, validation and test. leave_one_out does not use them."""
    split_seed: int = 0
    """The seed of the split. Runs with different --run.seed are tested on the same rows."""
    test: str = ""
    """Test on these files instead, such as the last day. Only for click logs."""
    ids: Literal["hashed", "mapped"] = "hashed"
    """How ids of click logs get rows of their table. hashed: by a hash, so that several ids may share a row.
    mapped: each id gets its own row when it has been seen --data.seen times."""
    seen: int = 1
    """How often an id has to be seen before it gets a row, with --data.ids mapped."""
    eviction: Literal["none", "least_recent", "least_frequent"] = "none"
    """Which id loses its row to a new one when all rows are taken, with --data.ids mapped."""
    batch: int = 4096
    """The number of rows of a step, over all ranks. A row of sasrec is a window of --model.length items and their targets."""
    chunk_rows: int = 512
    """Click logs are shuffled in chunks of this many neighbouring rows. A chunk of parquet is at most a row group."""
    max_broken: float = 0.01
    """Stop the run if more than this fraction of the rows is bad."""


@dataclass(frozen=True)
class ModelConfig:
    """The model: its kind, its layers, and the temperature of two_tower."""

    kind: Literal["lr", "fm", "deepfm", "dcn", "dlrm", "two_tower", "sasrec"] = "deepfm"
    """two_tower retrieves items for a user, sasrec the next item after a user's last ones; the others predict the probability
    of a click."""
    dim: int = 16
    """The width of the embeddings."""
    init: float = 0.01
    """The standard deviation of the initial embeddings."""
    hidden: tuple[int, ...] = (128, 64)
    """The widths of the hidden layers of the MLP; with two_tower, of each tower. sasrec has a layer of attention for each,
    with a feed-forward part of this width."""
    dropout: float = 0.4
    """Dropout after each hidden layer."""
    input_dropout: float = 0.2
    """Dropout of the inputs of the MLP."""
    embedding_dropout: float = 0.0
    """Dropout of all embeddings."""
    heads: int = 2
    """The number of attention heads of sasrec."""
    length: int = 50
    """How many of a user's last items sasrec takes."""
    crosses: int = 2
    """The number of cross layers of dcn."""
    bottom: tuple[int, ...] = (64,)
    """The widths of the hidden layers of dlrm's MLP for numbers. A layer of width `dim` follows."""
    users: tuple[str, ...] = ()
    """The features of two_tower's user tower, the column of the user first.
    Empty takes the user and all features that belong to users."""
    items: tuple[str, ...] = ()
    """The features of two_tower's item tower, the column of the item first.
    Empty takes the item and all features that belong to items. sasrec takes the item alone."""
    cosine: bool = True
    """Normalize the outputs of two_tower to unit length."""
    temperature: float = 0.1
    """The temperature of two_tower's softmax over the items of the global batch."""
    log_q: float = 1.0
    """How far two_tower corrects for popular items, which are negatives more often. 1 corrects fully, 0 not at all."""

    def __post_init__(self) -> None:
        if self.dim < 1 or self.crosses < 0 or min((*self.hidden, *self.bottom, 1)) < 1 or not self.temperature > 0:
            raise UserError(
                f"model: {self}: dim and all layers must be at least 1 wide, temperature must be positive, and crosses must "
                "not be negative"
            )
        if self.kind == "sasrec" and (self.length < 1 or self.heads < 1 or self.dim % self.heads):
            raise UserError(
                f"--model.heads {self.heads}, --model.length {self.length}: both must be positive, and the heads must divide "
                f"--model.dim {self.dim}"
            )

    @property
    def retrieves(self) -> bool:
        """Whether the model ranks all items for a user. Otherwise it predicts clicks."""
        return self.kind in ("two_tower", "sasrec")


@dataclass(frozen=True)
class TablesConfig:
    """The embedding tables: how they are sharded and trained. Rows that were looked up are updated during the backward."""

    plan: Literal["auto", "row", "column", "table", "replicated"] = "auto"
    """The layout of the tables over ranks. auto: the planner chooses one for each table."""
    memory_gb: float | None = None
    """The memory that a rank may use for tables, for the planner."""
    optimizer: Literal["adam", "adagrad", "rowwise_adagrad", "sgd"] = "adam"
    """The optimizer of the tables."""
    lr: float = 2e-2
    """The learning rate of the tables."""
    weight_decay: float = 0.0
    """Weight decay of the rows that a batch looks up. A row that a batch looks up several times decays once."""
    l2: float = 0.0
    """L2 penalty: half of it times the sum of the squared embeddings of each row is added to the loss. Only for
    click models."""
    wire: Literal["full", "bfloat16", "float16"] = "full"
    """The dtype in which rows of tables are communicated. full: the dtype of the tables."""
    prefetch: bool = False
    """Send the ids of the next batch while this one computes. It helps where communication is slow. Not for mapped ids."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW for all parameters outside of the tables. The schedule, a warm-up and a cosine, applies to the tables as well."""

    lr: float = 1e-3
    """The peak learning rate."""
    weight_decay: float = 0.1
    """Weight decay of the matrices. Vectors and scalars have none."""
    beta1: float = 0.9
    """AdamW's decay rate of the mean of gradients."""
    beta2: float = 0.999
    """AdamW's decay rate of the mean of squared gradients."""
    warmup: float = 0.0
    """The fraction of the steps in which the learning rate rises."""
    final: float = 0.0
    """The fraction of the peak learning rate that is left at the end."""


@dataclass(frozen=True)
class EvaluationConfig:
    """When a run ends early, and which items are ranked. Validation alone decides when: valid/auc, or valid/recall@10 of
    two_tower and sasrec."""

    patience: int = 0
    """Stop when this many evaluations in a row (see --run.evaluate-every) were no better than the best one before them.
    The weights of the best evaluation are then tested and exported, even if all steps were taken.
    0 takes all steps, and tests and exports the last one."""
    repeats: bool = False
    """Rank a user's earlier items, too, as RecBole does for sequential models. Otherwise two_tower and sasrec rank only items
    that the user has not had before."""

    def __post_init__(self) -> None:
        if self.patience < 0:
            raise UserError(f"--evaluation.patience {self.patience}: must be 0 (off) or a number of evaluations")


@dataclass(frozen=True)
class Config:
    """All settings of a training run."""

    run: RunConfig
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
