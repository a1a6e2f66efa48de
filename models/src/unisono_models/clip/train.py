"""Train the contrastive model: torchrun --nproc-per-node N -m unisono_models.clip train [RECIPE] [--field VALUE …]"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono_models.clip.config import Config
from unisono_models.clip.data.dataset import describe_sizes, open_dataset
from unisono_models.clip.data.loader import BatchMaker, load_steps
from unisono_models.clip.evaluate import Encoder, evaluate, list_test_captions
from unisono_models.clip.loss import ClipTrainingModule, backward
from unisono_models.clip.model import Clip
from unisono_models.clip.model.feature_cache import CaptionFeatures, ImageFeatures
from unisono_models.clip.model.tokenizer import load_or_make_tokenizer
from unisono_models.clip.model.trunks import check_pretrained_towers, describe_towers
from unisono_models.clip.optimizer import make_optimizer, set_learning_rate
from unisono_models.clip.recipes import RECIPES
from unisono_models.clip.report import write_run_report
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.distributed.parallel import autocast_context, parallelize, parameter_dtype
from unisono_models.training.errors import UserError
from unisono_models.training.loop import Session, TrainingLoop, start_session
from unisono_models.training.phases import phase
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
    check_pretrained_towers(config.model)
    dataset = open_dataset(config.data)
    datasets = dataset.build_datasets(size=size, seed=seed, ranks=ranks)
    session.directory.check_fingerprint("data", datasets.fingerprint())

    if ranks.first:
        print(describe_towers(config.model), flush=True)  # before they are made: weights may have to be downloaded
    torch.manual_seed(derive_seed(seed, "weights"))  # the same weights on every rank
    tokenizer = load_or_make_tokenizer(config.model.text, datasets.captions, session.directory.path / "tokenizer.json", ranks)
    session.directory.check_fingerprint("tokenizer", tokenizer.fingerprint())
    with raise_together("the towers"):
        clip = Clip(config.model, tokenizer)
        if clip.image.syncs_batch_norm and config.parallel.checkpoint_activations:
            raise UserError(
                "--parallel.checkpoint-activations would count each batch twice in the statistics of batch norm, which "
                f"{config.model.image.model} has. Use --model.image.batch-norm frozen, or another tower"
            )
        module = ClipTrainingModule(clip, config.loss).to(ranks.device, dtype)

    prepare_text: Callable[[Sequence[str]], Tensor] = tokenizer
    session.load_initial_weights(module)  # the features of frozen towers are computed now
    if config.model.text.frozen and datasets.captions_complete:
        prepare_text = CaptionFeatures(module.clip, datasets.captions, list_test_captions(datasets.tests), ranks, watchdog)
    image_features = None
    train_pairs = datasets.train
    if config.model.image.frozen and config.model.image.views:
        image_features = ImageFeatures(module.clip, datasets.train, config.augment, seed, ranks, watchdog)
        train_pairs = image_features.without_images(datasets.train)  # the steps read captions only
        image_features.skipped.check(config.data.max_broken)

    model = parallelize(module, config.parallel, ranks)
    optimizer = make_optimizer(module, config.optimizer)
    sampler = StepSampler(len(train_pairs), config.data.batch, seed, datasets.weights)
    second_view = config.loss.view_weight > 0
    batch_maker = BatchMaker(prepare_text, image_features, config.augment, seed, ranks.device, dtype, second_view)
    encoder = Encoder(model, prepare_text, ranks, watchdog, size, dtype)
    with TrainingLoop(session, model, optimizer) as loop:
        skipped = SkipReport(before=loop.state.get("skipped"), rows=len(train_pairs))
        batches = load_steps(
            train_pairs,
            lambda step: sampler.share(step, ranks.rank, ranks.world_size).tolist(),
            size,
            first=loop.first_step,
            last=loop.last_step,
            workers=config.data.workers,
        )
        count = f"{len(train_pairs):,} pairs, {loop.steps:,} steps of {sampler.batch} on {ranks.described}"
        loop.say(f"{session.directory.path}: {count}")
        for remark in describe_sizes(config.data, datasets):
            loop.say(remark)
        for step in loop:
            pairs = next(batches)
            skipped.add(pairs)
            if step == loop.first_step:  # before the loss of a batch in which nothing could be read
                skipped.check(config.data.max_broken)
            with phase("data"):
                batch = batch_maker.make(pairs, step=step, epoch=sampler.epoch_of(step))
            lr = set_learning_rate(optimizer, config.optimizer, step, loop.steps)
            model.train()
            if loop.just_resumed:
                with autocast_context(config.parallel, ranks):
                    backward(model, module, batch)
                optimizer.zero_grad()
            losses = train_step(model, module, optimizer, batch, config, ranks)
            shown = losses if len(losses) > 2 else {"loss": losses["loss"]}  # a single loss is their sum
            loop.log({**shown, "scale": module.pairs.scale, "lr": lr}, samples=len(sampler.at(step)))

            if loop.evaluation_due:
                loop.record(evaluate(encoder, datasets.tests))
            if loop.checkpoint_due:
                skipped.check(config.data.max_broken)
                loop.save({"skipped": skipped.summary()}, score=loop.first_metric)
        batches.close()  # ends the worker processes
        if not loop.finished:
            return
        metrics = loop.final_metrics(lambda: evaluate(encoder, datasets.tests))
    write_run_report(session.directory, config, module, encoder, dataset, datasets, metrics, skipped)


def train_step(
    model: nn.Module,
    module: ClipTrainingModule,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Any],
    config: Config,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """Take one step with this rank's `batch`, and return its losses. `model`: `module` as DDP or FSDP2 wraps it."""
    with autocast_context(config.parallel, ranks):
        losses = backward(model, module, batch)
    with phase("optimizer"):
        if config.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses
