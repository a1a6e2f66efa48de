"""Training steps that do not depend on the number of ranks: the check has nothing to say about them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.collectives.law.bugs import Contrastive, Piece, mlp, rows
from unisono.collectives import all_gather, all_reduce, global_mean
from unisono.contrastive import cached_backward, clip_loss, sigmoid_loss, supcon_loss
from unisono.dataparallel import convert_sync_batchnorm, sync_gradients

EVERY_SPLIT = {"world_sizes": (1, 2, 3, 4)}
TWO_RANKS = {"world_sizes": (1, 2), "splits": ("even", "uneven")}


class Clean(Piece):
    needs: tuple[str, ...] = ()  # packages beyond ours


class PlainDDP(Clean):
    """A loop as in torch's tutorial is right if all ranks have as many rows."""

    options = {"world_sizes": (1, 2, 3, 4), "splits": ("even",)}  # noqa: RUF012


class GlobalMean(Clean):
    options = EVERY_SPLIT

    @staticmethod
    def step(model, batch):
        return global_mean((model(batch["x"]) - batch["y"]).square())


class OwnSync(Clean):
    """No DDP, Adam, clipping after the sync, a metric with its own denominator, and a loss that is returned as a number."""

    options = {"world_sizes": (1, 2, 3, 4), "resume": True}  # noqa: RUF012

    @staticmethod
    def build():
        model = mlp()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    @staticmethod
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        y = model(batch["x"])
        loss = global_mean((y - batch["y"]).square())
        loss.backward()
        sync_gradients(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        right = all_reduce(torch.tensor([float(((y > 0) == (batch["y"] > 0)).sum()), float(len(y))]))
        return loss.item(), {"accuracy": right[0] / right[1]}


class Accumulation(Clean):
    """Micro-batches with one denominator: the valid rows of all micro-batches on all ranks."""

    options = EVERY_SPLIT
    batch = {"x": rows(12, 6), "y": rows(12, 1, seed=1), "valid": torch.arange(12) % 5 != 0}  # noqa: RUF012

    @staticmethod
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        count = all_reduce(batch["valid"].sum())
        parts = list(zip(*(batch[name].tensor_split(3) for name in ("x", "y", "valid")), strict=True))
        total = torch.zeros(())
        for number, (x, y, valid) in enumerate(parts):
            model.require_backward_grad_sync = number == len(parts) - 1
            loss = ((model(x) - y).square().squeeze(1) * valid).sum() * dist.get_world_size() / count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total


class FSDP2(Clean):
    options = {"world_sizes": (1, 2), "splits": ("even", "uneven"), "resume": True}  # noqa: RUF012

    @staticmethod
    def build():
        from torch.distributed.fsdp import fully_shard

        model = mlp()
        fully_shard(model[0])
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    step = GlobalMean.step


class SyncBatchNorm(Clean):
    options = EVERY_SPLIT

    @staticmethod
    def build():
        model = convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)))
        model = DistributedDataParallel(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    step = GlobalMean.step


class ClipLoss(Clean, Contrastive):
    options = EVERY_SPLIT

    @staticmethod
    def step(model, batch):
        x, y = F.normalize(model(torch.cat(batch)), dim=1).chunk(2)
        return clip_loss(x, y, 10.0)


class OtherLosses(Clean, Contrastive):
    """SigLIP and SupCon, with labels over the global batch."""

    options = EVERY_SPLIT
    batch = (rows(12, 6), rows(12, 6, seed=1), torch.arange(12) % 4)

    @staticmethod
    def step(model, batch):
        x, y = F.normalize(model(torch.cat(batch[:2])), dim=1).chunk(2)
        return sigmoid_loss(x, y, 10.0, -5.0) + supcon_loss(x, batch[2], temperature=0.1)


class GradCache(Clean, Contrastive):
    options = EVERY_SPLIT

    @staticmethod
    def step(model, batch):
        def loss(x, y):
            return clip_loss(F.normalize(x, dim=1), F.normalize(y, dim=1), 10.0)

        return cached_backward([model, model], list(batch), loss, micro_batch=2)


class OwnGatherLayer(Clean, Contrastive):
    """An autograd Function of one's own around dist.all_gather, whose backward is right."""

    options = {"world_sizes": (1, 2, 3), "splits": ("even",)}  # noqa: RUF012

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x)
            return torch.cat(parts)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def step(model, batch):
        x, y = model(torch.cat(batch)).chunk(2)
        x, y = OwnGatherLayer.Gather.apply(x), OwnGatherLayer.Gather.apply(y)
        return F.cross_entropy(x @ y.T, torch.arange(len(x)))


class GAN(Clean):
    """Two models, two optimizers, two backwards; a penalty on the slope of each sample."""

    options = {"world_sizes": (1, 2, 3)}  # noqa: RUF012

    @staticmethod
    def build():
        models = {"generator": mlp(6), "discriminator": mlp()}
        return models, {name: torch.optim.Adam(model.parameters(), lr=0.01) for name, model in models.items()}

    @staticmethod
    def step(models, optimizers, batch):
        generator, discriminator = models["generator"], models["discriminator"]
        fakes = generator(batch["x"].flip(1))
        real = batch["x"].clone().requires_grad_()
        scores = discriminator(real)
        (slopes,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        loss = global_mean(F.softplus(discriminator(fakes.detach())) + F.softplus(-scores) + slopes.square().sum(1, True))
        loss.backward()
        sync_gradients(discriminator.parameters())
        optimizers["discriminator"].step()
        generator_loss = global_mean(F.softplus(-discriminator(fakes)))
        generator_loss.backward()
        sync_gradients(generator.parameters())
        optimizers["generator"].step()
        return loss, {"generator": generator_loss}


class Checkpointing(Clean):
    """The first layer runs again in backward; the model is compiled."""

    options = {"world_sizes": (1, 3)}  # noqa: RUF012

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 1)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=False).tanh())

    @staticmethod
    def build():
        model = torch.compile(DistributedDataParallel(Checkpointing.Net()))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    step = GlobalMean.step


class LoaderWithSampler(Clean):
    """12 samples, shuffled alike, and a batch size that is divided by the ranks."""

    options = {"world_sizes": (1, 2, 3), "resume": True}  # noqa: RUF012
    data = TensorDataset(rows(12, 6), rows(12, 1, seed=1))

    @staticmethod
    def batch():
        sampler = DistributedSampler(LoaderWithSampler.data, seed=3)
        return DataLoader(LoaderWithSampler.data, batch_size=6 // dist.get_world_size(), sampler=sampler)

    @staticmethod
    def step(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])


class PaddedTokens(Clean):
    """Each rank pads its sentences to its longest one, with -1."""

    options = {"world_sizes": (1, 2, 3)}  # noqa: RUF012
    tokens = torch.where(torch.arange(9) < torch.arange(3, 9)[:, None], torch.arange(54).view(6, 9) % 7, -1)

    @staticmethod
    def build():
        model = DistributedDataParallel(nn.Embedding(8, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    @staticmethod
    def batch():
        part = PaddedTokens.tokens[dist.get_rank() :: dist.get_world_size()]
        return [{"tokens": part[:, : int((part >= 0).sum(1).max())], "y": part[:, 0].double()}]

    @staticmethod
    def step(model, batch):
        tokens = batch["tokens"]
        values = model(tokens.clamp(min=0)).squeeze(2) - batch["y"][:, None]
        return global_mean(values.square(), weights=(tokens >= 0).double())


class Float32(Clean):
    """A model that insists on float32, with Adam and a bias without a gradient (a shift before a norm)."""

    options = {"world_sizes": (1, 2, 3)}  # noqa: RUF012

    @staticmethod
    def build():
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).float()
        model = DistributedDataParallel(model)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    @staticmethod
    def step(model, batch):
        return global_mean((model(batch["x"].float()) - batch["y"].float()).square())


class ShardedTable(Clean):
    """A table whose rows are on different ranks, a DTensor."""

    options = {"world_sizes": (1, 2, 3)}  # noqa: RUF012
    batch = {"id": torch.arange(12) % 7, "y": rows(12, 1, seed=1)}  # noqa: RUF012

    @staticmethod
    def build():
        from unisono.embedding import ShardedEmbedding

        models = {"table": ShardedEmbedding(7, 4), "head": DistributedDataParallel(nn.Linear(4, 1))}
        return models, torch.optim.SGD([p for model in models.values() for p in model.parameters()], lr=0.1)

    @staticmethod
    def step(models, batch):
        return global_mean((models["head"](models["table"](batch["id"])) - batch["y"]).square())


class Timm(Clean):
    needs = ("timm",)
    options = TWO_RANKS
    batch = (rows(6, 3, 32, 32), torch.arange(6) % 3)

    @staticmethod
    def build():
        import timm

        model = DistributedDataParallel(timm.create_model("test_vit3", img_size=32, num_classes=3))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    @staticmethod
    def step(model, batch):
        return global_mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


class HuggingFace(Clean):
    """A classifier with its dropout off."""

    needs = ("transformers",)
    options = TWO_RANKS
    batch = {"input_ids": torch.arange(48).view(6, 8) % 30, "labels": torch.arange(6) % 3}  # noqa: RUF012

    @staticmethod
    def build():
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(**sizes, **off, num_labels=3))
        model = DistributedDataParallel(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    @staticmethod
    def step(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits
        return global_mean(F.cross_entropy(logits, batch["labels"], reduction="none"))


class GatheredStatistics(Clean):
    """The fix of BatchStatistics: the deviation over the rows of all ranks."""

    options = EVERY_SPLIT

    class Deviation(nn.Module):
        def forward(self, x):
            return x + all_gather(x).std(0)

    @staticmethod
    def build():
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), GatheredStatistics.Deviation(), nn.Linear(5, 1)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    step = GlobalMean.step


CLEAN = {
    name: piece
    for name, piece in list(globals().items())
    if isinstance(piece, type) and issubclass(piece, Clean) and piece is not Clean
}
