"""The settings of the recommender. Every field is an option of the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from unisono_models.training.config import CheckpointConfig, ParallelConfig, RunConfig

MOVIES = ("user_id", "item_id", "age:id", "gender", "occupation:id", "genre:ids", "release_year:id")
"""The seven fields of ml-1m in RecBole's context protocol."""


@dataclass(frozen=True)
class DataConfig:
    """What is learned from: interactions of users with items, or rows of clicks."""

    source: str = "ml-1m"
    """ml-1m or ml-100k (they come with pip packages); a folder of RecBole's atomic files; Criteo's TSV or parquet: a file, a
    folder, or a pattern such as '/data/day_{0..22}'."""
    format: Literal["auto", "atomic", "criteo", "parquet"] = "auto"
    """auto: by the names of the files; .inter is atomic, .parquet is parquet, all else is criteo."""
    features: tuple[str, ...] = MOVIES
    """Columns the model sees: NAME:id, NAME:ids (a bag), NAME:number, or NAME, of the kind that an atomic file's header says;
    NAME:id:ROWS where data is streamed. Numbers are taken as they are: scale them beforehand."""
    user: str = "user_id"
    """Column of the user, in atomic files."""
    item: str = "item_id"
    """Column of the item."""
    label: str = "rating"
    """Column of what is to be predicted."""
    keep: str = "[0,3);(3,inf)"
    """Of atomic files: interactions whose label is in these intervals."""
    threshold: float = 4.0
    """Of atomic files: a label of at least this is a 1, else a 0. Of two_tower all that are kept are liked."""
    split: Literal["rows", "per_user"] = "rows"
    """Of atomic files: random parts of all rows, or of each user's."""
    parts: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """Train, validation, test. Of streamed data the last two are blocks of lines."""
    split_seed: int = 0
    """Decides the parts: runs with other seeds are tested on the same rows."""
    test: str = ""
    """Streamed data to test on instead, such as the last day."""
    ids: Literal["hashed", "mapped"] = "hashed"
    """Of streamed data. hashed: to one of the rows. mapped: each id gets a row of its own once it has come `seen` times."""
    seen: int = 1
    """See `ids`."""
    eviction: Literal["none", "least_recent", "least_frequent"] = "none"
    """Who makes room when all rows are taken."""
    batch: int = 4096
    """Over all ranks."""
    block: int = 512
    """Lines of a stream that stay together when it is shuffled; of parquet, rows at most."""
    max_broken: float = 0.01
    """The run stops if a larger part of the rows is bad."""


@dataclass(frozen=True)
class ModelConfig:
    """What predicts."""

    kind: Literal["lr", "fm", "deepfm", "dcn", "dlrm", "two_tower"] = "deepfm"
    """What becomes of the embeddings of a row. two_tower is for retrieval, the others are for clicks."""
    dim: int = 16
    """Width of the embeddings."""
    init: float = 0.01
    """Standard deviation of the first embeddings."""
    hidden: tuple[int, ...] = (128, 64)
    """Layers of the perceptron; of two_tower, of each tower."""
    dropout: float = 0.4
    """After each layer of the perceptron."""
    input_dropout: float = 0.2
    """Of what the perceptron sees."""
    embedding_dropout: float = 0.0
    """Of all embeddings."""
    crosses: int = 2
    """Cross layers of dcn."""
    bottom: tuple[int, ...] = (64,)
    """Layers of dlrm's perceptron for numbers; one of `dim` follows."""
    users: tuple[str, ...] = ("user_id",)
    """Features of the user tower."""
    items: tuple[str, ...] = ("item_id",)
    """Features of the item tower."""
    cosine: bool = True
    """Towers give vectors of unit length."""
    temperature: float = 0.1
    """Of the softmax over the items of the global batch."""
    log_q: float = 1.0
    """How far frequent items, which come as negatives more often, are corrected for: 1 makes the loss that of all items."""

    def __post_init__(self) -> None:
        if self.dim < 1 or self.crosses < 0 or min((*self.hidden, *self.bottom, 1)) < 1 or not self.temperature > 0:
            raise ValueError(
                f"model: {self}: dim and layers are at least 1 wide, temperature is above 0, crosses are not negative"
            )


@dataclass(frozen=True)
class TablesConfig:
    """The embedding tables: where they lie, and how they learn. Rows that were looked up change during the backward."""

    plan: Literal["auto", "row", "column", "table", "replicated"] = "auto"
    """Where they lie: as the planner says, or all alike."""
    memory_gb: float | None = None
    """What a rank may hold, for the planner."""
    optimizer: Literal["adam", "adagrad", "rowwise_adagrad", "sgd"] = "adam"
    lr: float = 2e-2
    """Learning rate of the tables."""
    weight_decay: float = 0.0
    """Of rows that are looked up, however often a batch has them."""
    l2: float = 0.0
    """Half of it times the squares of a sample's embeddings is added to its loss. Not of two_tower."""
    wire: Literal["full", "bfloat16", "float16"] = "full"
    """How rows travel."""
    prefetch: bool = False
    """Row numbers of the next batch travel while this one computes. Worth it where communication is slow. Not of mapped ids."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW for all that is not a table; the schedule, a warm-up and a cosine, is that of the tables, too."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    warmup: float = 0.0
    """Part of the steps in which the learning rate rises."""
    final: float = 0.0
    """Part of the learning rate that is left at the end."""


@dataclass(frozen=True)
class Config:
    """A training of the recommender."""

    run: RunConfig
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
