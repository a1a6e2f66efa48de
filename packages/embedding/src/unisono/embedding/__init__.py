"""Embedding tables sharded over ranks, with the results and gradients of one process that has them whole."""

from unisono.embedding.clip_grad import clip_grad_norm_
from unisono.embedding.collection import EmbeddingCollection
from unisono.embedding.grad_scaler import GradScaler
from unisono.embedding.hashing import hash_strings
from unisono.embedding.id_map import IdMap, IdMapCollection
from unisono.embedding.inference import InferenceCollection, quantize, unshard
from unisono.embedding.lookup.input_dist import IdOutOfRange, UnknownFeature
from unisono.embedding.modules import ShardedEmbedding, ShardedEmbeddingBag
from unisono.embedding.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad
from unisono.embedding.parameters import exclude_from_ddp, sharded_parameters
from unisono.embedding.planner import Plan, plan_tables
from unisono.embedding.ragged import KeyedRagged, Ragged
from unisono.embedding.sharding.layouts import Layout
from unisono.embedding.table import Table
from unisono.embedding.table_optimizer import TableOptimizer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingCollection",
    "GradScaler",
    "IdMap",
    "IdMapCollection",
    "IdOutOfRange",
    "InferenceCollection",
    "KeyedRagged",
    "Layout",
    "Plan",
    "Ragged",
    "RowwiseAdagrad",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "Table",
    "TableOptimizer",
    "UnknownFeature",
    "clip_grad_norm_",
    "exclude_from_ddp",
    "hash_strings",
    "plan_tables",
    "quantize",
    "sharded_parameters",
    "unshard",
]
