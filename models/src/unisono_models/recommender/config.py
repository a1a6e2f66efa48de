"""The settings of the recommender. Every field is an option of the command line, and its docstring is the help text."""

from dataclasses import dataclass, field
from typing import Literal

from unisono_models.training.config import CheckpointConfig, ParallelConfig, RunConfig

MOVIELENS_FEATURES = ("user_id", "item_id", "age:id", "gender", "occupation:id", "genre:ids", "release_year:id")
"""The seven features of ml-1m in RecBole's context protocol."""


@dataclass(frozen=True)
class DataConfig:
    """The data: interactions of users with items, or rows of clicks."""

    source: str = "ml-1m"
    """The name of a dataset (ml-1m and ml-100k come with pip packages), a folder of RecBole's atomic files, or click logs.
    Click logs are in Criteo's TSV or in parquet: a file, a folder, or a pattern such as '/data/day_{0..22}'."""
    format: Literal["auto", "atomic", "criteo", "parquet"] = "auto"
    """The format of the files. auto goes by the suffix: .inter is atomic, .parquet is parquet, all others are criteo."""
    features: tuple[str, ...] = MOVIELENS_FEATURES
    """The columns that the model takes as inputs: NAME:id, NAME:ids for a bag of ids, or NAME:number.
    A plain NAME takes its kind from the header of an atomic file. Streamed data needs NAME:id:ROWS, the rows of the table.
    Numbers of atomic files and parquet are used as they are: scale them beforehand."""
    user: str = "user_id"
    """The column of the user, in atomic files."""
    item: str = "item_id"
    """The column of the item, in atomic files."""
    label: str = "rating"
    """The column that the model predicts."""
    keep: str = "[0,3);(3,inf)"
    """Use only the interactions whose label is in one of these intervals. For atomic files."""
    threshold: float = 4.0
    """A label of at least this counts as 1, others as 0. For atomic files.
    two_tower ignores it: every interaction is a positive."""
    split: Literal["rows", "per_user"] = "rows"
    """Split all rows at random, or the rows of each user. For atomic files."""
    parts: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """The fractions for training, validation and test. Streamed data is split by chunks."""
    split_seed: int = 0
    """The seed of the split. Runs with different run.seed are tested on the same rows."""
    test: str = ""
    """Test on these files instead, such as the last day. For streamed data."""
    ids: Literal["hashed", "mapped"] = "hashed"
    """How ids of streamed data get rows of their table. hashed: by a hash; several ids may share a row.
    mapped: each id gets its own row when it has been seen `seen` times."""
    seen: int = 1
    """With ids=mapped: how often an id has to be seen before it gets a row."""
    eviction: Literal["none", "least_recent", "least_frequent"] = "none"
    """With ids=mapped: which id loses its row to a new one when all rows are taken."""
    batch: int = 4096
    """The rows of a step, over all ranks."""
    chunk_rows: int = 512
    """Streamed data is shuffled in chunks of this many neighbouring rows. A chunk of parquet is at most a row group."""
    max_broken: float = 0.01
    """Stop the run if more than this fraction of the rows is bad."""


@dataclass(frozen=True)
class ModelConfig:
    """The model: its kind, its layers, and the temperature of two_tower."""

    kind: Literal["lr", "fm", "deepfm", "dcn", "dlrm", "two_tower"] = "deepfm"
    """two_tower retrieves items for a user; the others predict the probability of a click."""
    dim: int = 16
    """The width of the embeddings."""
    init: float = 0.01
    """The standard deviation of the initial embeddings."""
    hidden: tuple[int, ...] = (128, 64)
    """The widths of the hidden layers of the MLP; with two_tower, of each tower."""
    dropout: float = 0.4
    """Dropout after each hidden layer."""
    input_dropout: float = 0.2
    """Dropout of the inputs of the MLP."""
    embedding_dropout: float = 0.0
    """Dropout of all embeddings."""
    crosses: int = 2
    """The number of cross layers of dcn."""
    bottom: tuple[int, ...] = (64,)
    """The widths of the hidden layers of dlrm's MLP for numbers. A layer of width `dim` follows."""
    users: tuple[str, ...] = ("user_id",)
    """The features of two_tower's user tower. The column of the user has to be the first."""
    items: tuple[str, ...] = ("item_id",)
    """The features of two_tower's item tower. The column of the item has to be the first."""
    cosine: bool = True
    """Normalize the outputs of two_tower to unit length."""
    temperature: float = 0.1
    """The temperature of two_tower's softmax over the items of the global batch."""
    log_q: float = 1.0
    """How far two_tower corrects for popular items, which are negatives more often. 1 corrects fully, 0 not at all."""

    def __post_init__(self) -> None:
        if self.dim < 1 or self.crosses < 0 or min((*self.hidden, *self.bottom, 1)) < 1 or not self.temperature > 0:
            raise ValueError(
                f"model: {self}: dim and all layers must be at least 1 wide, temperature must be positive, and crosses must "
                "not be negative"
            )


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
    """L2 penalty: half of it times the sum of the squared embeddings of each row is added to the loss. Not for two_tower."""
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
class Config:
    """All settings of a training run."""

    run: RunConfig
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
