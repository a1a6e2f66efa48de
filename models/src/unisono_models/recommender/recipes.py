"""The recipes: which model is trained, on which data, for how long. The command line can change any field.

Which features and ratings of MovieLens they use stands in protocols.py, so that it does not apply to other data.
"""

from dataclasses import replace

from unisono_models.recommender.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TablesConfig,
)
from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.config.recipes import Recipes

RECIPES: Recipes[Config] = Recipes("recommender", Config)

EPOCH = 145  # steps of 4,096 in the 591,210 rows that ml-1m's context protocol trains on
INTEGERS = tuple(f"I{number}:number" for number in range(1, 14))


@RECIPES.add
def deepfm() -> Config:
    """DeepFM on MovieLens-1M: whether a user likes a movie (RecBole's context protocol)."""
    return Config(
        run=RunConfig(steps=7 * EPOCH, evaluate_every=EPOCH, log_every=20),
        model=ModelConfig("deepfm"),
        tables=TablesConfig(l2=0.015),
        checkpoint=CheckpointConfig(every=2 * EPOCH),
    )


@RECIPES.add
def dcn() -> Config:
    """DCN-v2, otherwise as deepfm."""
    model = ModelConfig("dcn", crosses=1, embedding_dropout=0.2)
    optimizer = OptimizerConfig(lr=3e-3, weight_decay=1.0)
    config = replace(deepfm(), model=model, tables=TablesConfig(l2=0.015), optimizer=optimizer)
    return replace(config, run=replace(config.run, steps=10 * EPOCH))


@RECIPES.add
def dlrm() -> Config:
    """DLRM, otherwise as deepfm."""
    model = ModelConfig("dlrm", dropout=0.3, input_dropout=0.0, embedding_dropout=0.2)
    return replace(deepfm(), model=model, tables=TablesConfig(l2=0.01), optimizer=OptimizerConfig(lr=4e-3))


@RECIPES.add
def fm() -> Config:
    """A factorization machine, otherwise as deepfm."""
    config = replace(deepfm(), model=ModelConfig("fm"), tables=TablesConfig(l2=0.02), optimizer=OptimizerConfig(lr=4e-3))
    return replace(config, run=replace(config.run, steps=10 * EPOCH))


@RECIPES.add
def lr() -> Config:
    """Logistic regression, otherwise as deepfm."""
    config = replace(deepfm(), model=ModelConfig("lr"), tables=TablesConfig())
    return replace(config, run=replace(config.run, steps=5 * EPOCH))


@RECIPES.add
def two_tower() -> Config:
    """Two towers on MovieLens-1M: which of all movies a user likes (RecBole-GNN's general protocol, full sort)."""
    return Config(
        run=RunConfig(steps=6 * 330, evaluate_every=330, log_every=20),
        data=DataConfig(split="per_user", batch=2048),
        model=ModelConfig("two_tower", dim=64, init=0.1, hidden=(), temperature=0.15, log_q=1.2),
        checkpoint=CheckpointConfig(every=660),
    )


@RECIPES.add
def sasrec() -> Config:
    """SASRec on MovieLens-1M: which movie a user rates next (RecBole's sequential protocol, leave one out, full sort)."""
    epoch = 301  # steps of 64 windows in the 19,261 of ml-1m's sequential protocol
    return Config(
        run=RunConfig(steps=30 * epoch, evaluate_every=2 * epoch, log_every=20),
        data=DataConfig(split="leave_one_out", batch=64),
        model=ModelConfig("sasrec", dim=64, init=0.02, hidden=(256, 256), dropout=0.1, embedding_dropout=0.3),
        tables=TablesConfig(plan="row", lr=2.5e-3),
        optimizer=OptimizerConfig(lr=2.5e-3, weight_decay=0.0, warmup=0.01),
        evaluation=EvaluationConfig(repeats=True),
        checkpoint=CheckpointConfig(every=4 * epoch),
    )


@RECIPES.add
def tiny() -> Config:
    """DeepFM on MovieLens-100k: takes seconds, to see that everything works."""
    return Config(
        run=RunConfig(steps=60, evaluate_every=30, timeout=60),
        data=DataConfig("ml-100k", batch=1024),
        model=ModelConfig("deepfm", dim=8, hidden=(32,), dropout=0.2),
        tables=TablesConfig(lr=1e-2),
        optimizer=OptimizerConfig(lr=1e-2),
        checkpoint=CheckpointConfig(every=25),
    )


@RECIPES.add
def criteo() -> Config:
    """DLRM on Criteo's click logs, streamed, for a cluster: --data.source '/data/day_{0..22}' --data.test /data/day_23"""
    return Config(
        run=RunConfig(steps=64_000, log_every=50, evaluate_every=16_000, timeout=1800),
        data=DataConfig(
            "/data/day_{0..22}",
            format="criteo",
            features=(*INTEGERS, *(f"C{number}:id:10000000" for number in range(1, 27))),
            label="label",
            parts=(0.98, 0.01, 0.01),
            batch=65_536,
        ),
        model=ModelConfig("dlrm", dim=128, hidden=(1024, 1024, 512, 256), dropout=0.0, input_dropout=0.0, bottom=(512, 256)),
        tables=TablesConfig(optimizer="rowwise_adagrad", lr=0.02, prefetch=True),
        optimizer=OptimizerConfig(weight_decay=0.0, warmup=0.05),
        checkpoint=CheckpointConfig(every=4000),
    )
