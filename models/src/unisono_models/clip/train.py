"""Train the contrastive learner: torchrun --nproc-per-node N -m unisono_models.clip.train [RECIPE] [--field VALUE …]"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono_models.clip.config import Config
from unisono_models.clip.data.dataset import open_dataset
from unisono_models.clip.data.loader import BatchMaker, load_steps
from unisono_models.clip.evaluate import Encoder, evaluate, list_test_captions
from unisono_models.clip.loss import ClipTrainingModule, backward
from unisono_models.clip.model import Clip
from unisono_models.clip.model.feature_cache import CaptionFeatures, ImageFeatures
from unisono_models.clip.model.tokenizer import load_or_make_tokenizer
from unisono_models.clip.optimizer import make_optimizer, set_learning_rate
from unisono_models.clip.recipes import RECIPES
from unisono_models.clip.report import finish_run
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.training.checkpoint.manager import Checkpoints
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.parallel import autocast_context, parallelize, parameter_dtype
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.randomness import derive_seed
from unisono_models.training.run.log import RunLog
from unisono_models.training.run.preemption import StopSignal
from unisono_models.training.run.run_directory import open_run
from unisono_models.training.sampler import StepSampler
from unisono_models.training.schedule import is_due


def main(args: Sequence[str] | None = None) -> None:
    recipe, config = RECIPES.choose(args)
    timeout = config.run.timeout
    with start_ranks(timeout=timeout) as ranks, StopSignal() as stopping, Watchdog(ranks, timeout=timeout) as heartbeat:
        train(recipe, config, ranks, stopping, heartbeat)


def train(recipe: str, config: Config, ranks: Ranks, stopping: StopSignal, heartbeat: Watchdog) -> None:
    """One run, from its data to its report."""
    run = open_run(config, model="clip", recipe=recipe, ranks=ranks)
    seed, steps, size = config.run.seed, config.run.steps, config.model.image.size
    dataset = open_dataset(config.data)
    source = dataset.build(size=size, seed=seed, ranks=ranks)

    torch.manual_seed(derive_seed(seed, "weights"))  # the same weights on every rank
    tokenizer = load_or_make_tokenizer(config.model.text, source.captions, run.path / "tokenizer.json", ranks)
    learner = ClipTrainingModule(Clip(config.model, tokenizer), config.objective).to(
        ranks.device, parameter_dtype(config.parallel)
    )
    read_text: Callable[[Sequence[str]], Tensor] = tokenizer
    if config.model.text.frozen and source.captions_complete:
        read_text = CaptionFeatures(learner.clip, source.captions, list_test_captions(source.tests), ranks, heartbeat)
    train_pairs = source.train
    pictures = None
    if config.model.image.frozen and config.model.image.views:
        pictures = ImageFeatures(learner.clip, source.train, config.augment, seed, ranks, heartbeat)
        train_pairs = pictures.without_images(source.train)
    model = parallelize(learner, config.parallel, ranks)
    optimizer = make_optimizer(learner, config.optimizer)

    order = StepSampler(len(source.train), config.data.batch, seed, source.weights)
    views = config.objective.view_weight > 0
    batches = BatchMaker(read_text, pictures, config.augment, seed, ranks.device, parameter_dtype(config.parallel), views)
    encoder = Encoder(model, read_text, ranks, heartbeat, size, parameter_dtype(config.parallel))
    with Checkpoints(run.checkpoints, keep=config.checkpoint.keep, timeout=config.run.timeout) as checkpoints:
        first, state = checkpoints.load(model, optimizer) or (0, {})
        skipped = SkipReport(before=state.get("skipped"))
        last, figures = steps if config.run.stop_after is None else min(steps, config.run.stop_after), None
        shares = load_steps(
            train_pairs,
            lambda step: order.share(step, ranks.rank, ranks.size).tolist(),
            size,
            first=first,
            last=last,
            workers=config.data.workers,
        )
        with RunLog(run, ranks, steps=steps, first_step=first, log_every=config.run.log_every) as log:
            done = first
            log.say(f"{run.path}: {len(source.train):,} pairs, {steps:,} steps of {order.batch} on {ranks.size} ranks")
            if first:
                log.say(f"continuing at step {first:,}")
            for step, pairs in enumerate(shares, first):
                model.train()
                skipped.add(pairs)
                batch = batches.make(pairs, step=step, epoch=order.epoch_of(step))
                rate = set_learning_rate(optimizer, config.optimizer, step, steps)
                with autocast_context(config.parallel, ranks):
                    if step == first > 0:  # DDP arranges its buckets, by which sums are rounded, in its first backward
                        backward(model, learner, batch)
                        optimizer.zero_grad()
                    losses = backward(model, learner, batch)
                if config.optimizer.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(learner.parameters(), config.optimizer.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                heartbeat.beat(step + 1)
                log.step(step, {**losses, "scale": learner.pairs.scale, "lr": rate}, samples=len(order.at(step)))

                done, figures = step + 1, None
                stop = stopping.agreed() or done == last < steps
                if done == steps or is_due(done, config.run.evaluate_every):
                    figures = evaluate(encoder, source.tests)
                    log.evaluation(step, figures)
                if stop or done == steps or figures or is_due(done, config.checkpoint.every):
                    skipped.check(config.data.max_broken)
                    log.flush()
                    score = figures[next(iter(figures))] if figures else None
                    checkpoints.save(done, model, optimizer, {"skipped": skipped.summary()}, score=score)
                if stop:
                    break
            saved = checkpoints.wait()
            if done < steps:
                if not saved:
                    raise SystemExit(f"stopped after step {done:,} of {steps:,}, which could not be saved")
                log.say(f"stopped after step {done:,} of {steps:,}; the same command goes on from there")
                return
            if figures is None:  # an earlier start came as far as this
                figures = evaluate(encoder, source.tests)
                log.evaluation(steps - 1, figures)
        finish_run(run, config, learner, encoder, dataset, source, figures, skipped)


if __name__ == "__main__":
    main()
