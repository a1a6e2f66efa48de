"""Embedding tables spread over ranks, with the results and gradients of one process that has them whole."""

from unisono.embedding.collection import EmbeddingCollection
from unisono.embedding.exclusion import exclude_from_ddp, sharded_parameters
from unisono.embedding.layouts import Layout
from unisono.embedding.messages import IdOutOfRange
from unisono.embedding.optimizers import SGD, Adagrad, Adam, FusedOptimizer, RowwiseAdagrad
from unisono.embedding.planning.planner import Plan, plan_tables
from unisono.embedding.ragged import Ragged
from unisono.embedding.sharded_embedding import ShardedEmbedding
from unisono.embedding.sharded_embedding_bag import ShardedEmbeddingBag
from unisono.embedding.tables import Table
from unisono.embedding.vocabulary.id_map import IdMap, hash_strings

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingCollection",
    "FusedOptimizer",
    "IdMap",
    "IdOutOfRange",
    "Layout",
    "Plan",
    "Ragged",
    "RowwiseAdagrad",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "Table",
    "exclude_from_ddp",
    "hash_strings",
    "plan_tables",
    "sharded_parameters",
]
