"""Train the contrastive learner: torchrun --nproc-per-node N -m unisono_models.clip train [RECIPE] [--field VALUE …]"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono_models.clip.config import Config
from unisono_models.clip.data.dataset import open_source
from unisono_models.clip.data.loader import Batches, load_steps
from unisono_models.clip.evaluate import Encoder, evaluate
from unisono_models.clip.loss import Learner, backward
from unisono_models.clip.model import Clip
from unisono_models.clip.model.feature_cache import CaptionFeatures, PictureFeatures, tested_captions
from unisono_models.clip.model.tokenizer import shared_tokenizer
from unisono_models.clip.optimizer import make_optimizer, set_learning_rate
from unisono_models.clip.recipes import RECIPES
from unisono_models.clip.report import conclude
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.training.distributed.parallel import autocast_context, parallelize, parameter_dtype
from unisono_models.training.loop import Session, TrainingLoop, start_session
from unisono_models.training.randomness import derive_seed
from unisono_models.training.sampler import StepSampler


def main(args: Sequence[str] | None = None) -> None:
    recipe, config = RECIPES.choose(args)
    with start_session(config, model="clip", recipe=recipe) as session:
        train(config, session)


def train(config: Config, session: Session) -> None:
    """Train one run, from its data to its report."""
    ranks, watchdog = session.ranks, session.watchdog
    seed, size, dtype = config.run.seed, config.model.image.size, parameter_dtype(config.parallel)
    source = open_source(config.data, size=size, seed=seed, ranks=ranks)

    torch.manual_seed(derive_seed(seed, "weights"))  # the same weights on every rank
    tokenizer = shared_tokenizer(config.model.text, source.captions, session.directory.path / "tokenizer.json", ranks)
    learner = Learner(Clip(config.model, tokenizer), config.objective).to(ranks.device, dtype)
    read_text: Callable[[Sequence[str]], Tensor] = tokenizer
    if config.model.text.frozen and source.complete:
        read_text = CaptionFeatures(learner.clip, source.captions, tested_captions(source), ranks, watchdog)
    pictures = None
    if config.model.image.frozen and config.model.image.views:
        pictures = PictureFeatures(learner.clip, source.train, config.augment, seed, ranks, watchdog)
    model = parallelize(learner, config.parallel, ranks)
    optimizer = make_optimizer(learner, config.optimizer)

    sampler = StepSampler(len(source.train), config.data.batch, seed, source.weights)
    views = config.objective.view_weight > 0
    batches = Batches(read_text, pictures, config.augment, seed, ranks.device, dtype, views)
    encoder = Encoder(model, read_text, ranks, watchdog, size, dtype)
    with TrainingLoop(session, model, optimizer) as loop:
        skipped = SkipReport(before=loop.state.get("skipped"))
        shares = load_steps(
            source.train,
            lambda step: sampler.share(step, ranks.rank, ranks.size).tolist(),
            size,
            first=loop.first_step,
            last=loop.last_step,
            workers=config.data.workers,
        )
        count = f"{len(source.train):,} pairs, {loop.steps:,} steps of {sampler.batch} on {ranks.size} ranks"
        loop.say(f"{session.directory.path}: {count}")
        for step in loop:
            pairs = next(shares)
            skipped.add(pairs)
            batch = batches.make(pairs, step=step, epoch=sampler.epoch_of(step))
            rate = set_learning_rate(optimizer, config.optimizer, step, loop.steps)
            model.train()
            with autocast_context(config.parallel, ranks):
                if loop.just_resumed:
                    backward(model, learner, batch)
                    optimizer.zero_grad()
                losses = backward(model, learner, batch)
            if config.optimizer.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(learner.parameters(), config.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            loop.log({**losses, "scale": learner.pairs.scale, "lr": rate}, samples=len(sampler.at(step)))

            if loop.evaluation_due:
                loop.record(evaluate(encoder, source.tests))
            if loop.checkpoint_due:
                skipped.check(config.data.max_broken)
                loop.save({"skipped": skipped.summary()}, score=loop.first_metric)
        if not loop.finished:
            return
        metrics = loop.final_metrics(lambda: evaluate(encoder, source.tests))
    conclude(session.directory, config, learner, encoder, source, metrics, skipped)
