"""A museum of bugs: training steps that depend on the number of ranks. Each has one bug that somebody found in public.

The docstring names where. The code is ours, cut down to the bug. `cause` is what `check` must say.
"""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unisono.collectives import all_gather, all_reduce, global_mean
from unisono.dataparallel import sync_gradients


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(last=1):
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, last))


def average_gradients(model, op=dist.ReduceOp.SUM, divide=True):
    for p in model.parameters():
        dist.all_reduce(p.grad, op)
        if divide:
            p.grad /= dist.get_world_size()


class Piece:
    """A small regression with DDP. Pieces change what their bug needs."""

    cause = ""
    where = ""  # must be in the finding's `where`
    batch: object = {"x": rows(12, 6), "y": rows(12, 1, seed=1)}
    options: dict[str, object] = {"world_sizes": (1, 2, 3), "splits": ("even",)}  # noqa: RUF012

    @staticmethod
    def build():
        model = DistributedDataParallel(mlp())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    @staticmethod
    def step(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"])


class WithoutDDP(Piece):
    @staticmethod
    def build():
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Contrastive(Piece):
    """Two towers; the loss of one direction."""

    batch = (rows(12, 6), rows(12, 6, seed=1))

    @staticmethod
    def build():
        model = DistributedDataParallel(mlp(4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Loader(Piece):
    """Data of 14 rows, read by a loader on each rank."""

    options = {"world_sizes": (1, 2, 3)}  # noqa: RUF012
    data = TensorDataset(rows(14, 6), rows(14, 1, seed=1))

    @staticmethod
    def step(model, batch):
        return global_mean((model(batch[0]) - batch[1]).square())


# The loss


class LocalMean(Piece):
    """ChenmienTan/RL2#11 explains it: the mean of means is not the mean if ranks have different numbers of samples."""

    cause = "local_mean"
    options = {"world_sizes": (1, 2, 3), "splits": ("even", "uneven", "empty")}  # noqa: RUF012


class TokenMean(Piece):
    """huggingface/transformers#34373: each rank divides by its own number of tokens."""

    cause = "token_mean"
    batch = {"x": rows(12, 6), "y": rows(12, 1, seed=1), "valid": torch.arange(12) % 5 != 0}  # noqa: RUF012

    @staticmethod
    def step(model, batch):
        errors = (model(batch["x"]) - batch["y"]).square()
        return (errors.squeeze(1) * batch["valid"]).sum() / batch["valid"].sum()


class AccumulatedMeans(Piece):
    """huggingface/transformers#34242: micro-batches with different numbers of tokens are averaged as equals."""

    cause = "accumulated_means"
    batch = TokenMean.batch

    @staticmethod
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        total = 0.0
        parts = list(zip(*(batch[name].chunk(2) for name in ("x", "y", "valid")), strict=True))
        for x, y, valid in parts:
            errors = (model(x) - y).square().squeeze(1) * valid
            loss = errors.sum() / valid.sum().clamp(min=1) / len(parts)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total


class ScaledLoss(Piece):
    """neuralmagic/sparseml#135, ultralytics/ultralytics#18616: the loss times the number of ranks."""

    cause = "scaled_loss"

    @staticmethod
    def step(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"]) * dist.get_world_size()


class DividedTwice(Piece):
    """NVIDIA/apex#696: the loss over the number of ranks, and DDP averages again."""

    cause = "divided_twice"

    @staticmethod
    def step(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"]) / dist.get_world_size()


class LossOfOwnRows(Contrastive):
    """facebookresearch/vissl#474, microsoft/UniCL#5: negatives of one rank only."""

    cause = "loss_of_own_rows"

    @staticmethod
    def step(model, batch):
        a, b = model(torch.cat(batch)).chunk(2)
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))


class GradientPenalty(Piece):
    """A penalty behind a gather that adds gradients, as in lucidrains/gigagan-pytorch: W times, squared W² times."""

    cause = "squared_factor"
    options = {"world_sizes": (1, 2, 3), "splits": ("even", "uneven")}  # noqa: RUF012

    @staticmethod
    def step(model, batch):
        x = batch["x"].clone().requires_grad_()
        (slopes,) = torch.autograd.grad(all_gather(model(x)).square().mean(), x, create_graph=True)
        return global_mean(slopes.square().sum(1))


# Collectives


class CutGather(Contrastive):
    """huggingface/accelerate#1154: dist.all_gather returns constants, so other ranks' rows get no gradient from this loss."""

    cause = "cut_gradient"
    where = "bugs.py"

    @staticmethod
    def step(model, batch):
        a, b = model(torch.cat(batch)).chunk(2)
        gathered = [torch.empty_like(b) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, b)
        gathered[dist.get_rank()] = b
        return F.cross_entropy(a @ torch.cat(gathered).T, dist.get_rank() * len(a) + torch.arange(len(a)))


class OwnSliceGradient(Contrastive):
    """mlfoundations/open_clip#616: the whole loss on every rank, with a gradient through the own slice only."""

    cause = "own_slice_gradient"
    where = "bugs.py"

    @staticmethod
    def step(model, batch):
        def gather(x):
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x)
            parts[dist.get_rank()] = x
            return torch.cat(parts)

        a, b = map(gather, model(torch.cat(batch)).chunk(2))
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))


class SkippedCollective(WithoutDDP):
    """OpenTSLM/OpenTSLM#49: `if p.grad is not None: all_reduce`. A rank without this gradient does not take part."""

    cause = "skipped_collective"
    where = ""
    options = {"world_sizes": (1, 2), "splits": ("empty",), "timeout": 4.0}  # noqa: RUF012

    @staticmethod
    def step(model, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")
        if len(batch["x"]):
            loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        return loss.detach()


class UnusedParameter(Piece):
    """pytorch/pytorch#112152: DDP waits for a parameter that no loss uses."""

    cause = "unused_parameter"
    options = {"world_sizes": (1, 2), "splits": ("even",)}  # noqa: RUF012

    class Experts(nn.ModuleDict):
        def forward(self, x):
            return self[str(dist.get_rank())](x)

    @staticmethod
    def build():
        model = DistributedDataParallel(UnusedParameter.Experts({"0": mlp(), "1": mlp()}))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    @staticmethod
    def step(model, batch):
        loss = model(batch["x"]).square().mean()
        return loss if dist.get_world_size() > 1 else loss + 0 * sum(p.sum() for p in model.parameters())


# Sync


class Bypassed(Piece):
    """jingyaogong/minimind#853, moojink/openvla-oft#160: the model inside DDP is called."""

    cause = "bypassed_wrapper"
    where = "bugs.py"

    @staticmethod
    def step(model, batch):
        return F.mse_loss(model.module(batch["x"]), batch["y"])


class BypassedPart(Piece):
    """bytetriper/RAE#40, intel/e2eAIOK#198: a part of the model inside DDP is called."""

    cause = "bypassed_wrapper"
    where = "bugs.py"

    @staticmethod
    def step(model, batch):
        encoder, nonlinearity, head = model.module
        return F.mse_loss(head(nonlinearity(encoder(batch["x"]))), batch["y"])


class MissingSync(WithoutDDP):
    """lucidrains/vector-quantize-pytorch#222: parameters with an optimizer of their own, which nobody syncs."""

    cause = "missing_sync"


class SyncSwitchedOff(Piece):
    """modelscope/FunASR#3472: the last micro-batch is in no_sync(), too."""

    cause = "sync_switched_off"

    @staticmethod
    def step(model, optimizer, batch):
        total = 0.0
        for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True):
            with model.no_sync():
                loss = F.mse_loss(model(x), y) / 2
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total


class SecondBackward(Piece):
    """pytorch/pytorch#47260: two backwards for one forward of DDP. The second one is not synced."""

    cause = "second_backward"

    @staticmethod
    def step(model, batch):
        y = model(batch["x"])
        F.mse_loss(y, batch["y"]).backward(retain_graph=True)
        loss = y.abs().mean()
        loss.backward()
        return loss.detach()


class HeadOutside(Piece):
    """pytorch/pytorch#12603: a parameter that came after DDP."""

    cause = "parameter_outside_wrapper"
    where = "head"

    @staticmethod
    def build():
        models = {"body": DistributedDataParallel(mlp(3)), "head": nn.Linear(3, 1)}
        return models, torch.optim.SGD([p for model in models.values() for p in model.parameters()], lr=0.1)

    @staticmethod
    def step(models, batch):
        return F.mse_loss(models["head"](models["body"](batch["x"])), batch["y"])


class DoubledSync(Piece):
    """kubeflow/pytorch-operator#122: DDP, and average_gradients of one's own (here: its sum)."""

    cause = "doubled_sync"
    where = "bugs.py"

    @staticmethod
    def step(model, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        average_gradients(model, divide=False)
        return loss.detach()


class SummedGradients(WithoutDDP):
    """TianhongDai/hindsight-experience-replay#4: gradients are summed over processes, and the loss is a mean."""

    cause = "summed_gradients"
    where = "bugs.py"

    @staticmethod
    def step(model, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        average_gradients(model, divide=False)
        return loss.detach()


class ClippedBeforeSync(WithoutDDP):
    """mindspore-lab/mindcv#603, determined-ai/determined#602: clipped by the norm of one rank, then averaged."""

    cause = "clipped_before_sync"

    @staticmethod
    def step(model, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        average_gradients(model)
        return loss.detach()


# Start and data


class DifferentStart(WithoutDDP):
    """sparticlesteve/pytorch-benchmarks#1: every rank draws its own parameters, and only gradients are synced."""

    cause = "different_start"

    @staticmethod
    def build():
        torch.manual_seed(dist.get_rank())
        return WithoutDDP.build()

    @staticmethod
    def step(model, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        sync_gradients(model.parameters())
        return loss.detach()


class SameSamples(Loader):
    """PatrickHua/SimSiam#16: no DistributedSampler."""

    cause = "same_samples"

    @staticmethod
    def batch():
        return DataLoader(Loader.data, batch_size=7)


class RepeatedSamples(Loader):
    """pytorch/pytorch#25162: the sampler repeats samples until all ranks have as many."""

    cause = "repeated_samples"
    options = {"world_sizes": (1, 3)}  # noqa: RUF012

    @staticmethod
    def batch():
        return DataLoader(Loader.data, batch_size=5, sampler=DistributedSampler(Loader.data, shuffle=False))


class DroppedSamples(Loader):
    """lhotse-speech/lhotse#695, #1277: what does not divide by the number of ranks is dropped."""

    cause = "dropped_samples"
    options = {"world_sizes": (1, 3)}  # noqa: RUF012

    @staticmethod
    def batch():
        return DataLoader(Loader.data, batch_size=5, sampler=DistributedSampler(Loader.data, shuffle=False, drop_last=True))


class OverlappingSamples(Loader):
    """NVlabs/LongLive#71: every rank shuffles with a seed of its own before the data is divided."""

    cause = "overlapping_samples"

    @staticmethod
    def batch():
        sampler = DistributedSampler(Loader.data, seed=5 * dist.get_rank())
        return DataLoader(Loader.data, batch_size=14 // dist.get_world_size(), sampler=sampler)


class OtherOrder(Loader):
    """accelerate unless use_seedable_sampler is set: several processes shuffle with another generator than one."""

    cause = "other_order"
    options = {"world_sizes": (1, 2)}  # noqa: RUF012

    @staticmethod
    def batch():
        sampler = DistributedSampler(Loader.data, seed=dist.get_world_size())
        return DataLoader(Loader.data, batch_size=2 // dist.get_world_size(), sampler=sampler)


class GrowingBatch(Loader):
    """catalyst-team/catalyst#1023, LoicGrobol/zeldarose#1: the batch size is that of one rank."""

    cause = "growing_batch"
    options = {"world_sizes": (1, 2)}  # noqa: RUF012

    @staticmethod
    def batch():
        return DataLoader(Loader.data, batch_size=2, sampler=DistributedSampler(Loader.data, shuffle=False))


class DroppedRows(Piece):
    """pytorch/vision#6605: what is left of a batch that does not divide is skipped."""

    cause = "dropped_rows"

    @staticmethod
    def step(model, batch):
        even = len(batch["x"]) // 5 * 5 or 3
        return F.mse_loss(model(batch["x"][:even]), batch["y"][:even])


# The model


class BatchNorm(Piece):
    """MCG-NJU/TDN#22, huggingface/pytorch-image-models#110: batch norm of one rank's rows."""

    cause = "batch_norm"
    where = "module 1"

    @staticmethod
    def build():
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Dropout(Piece):
    """ecmwf/anemoi-core#595: ranks with one seed drop the same elements of different samples."""

    cause = "random_module"
    where = "module 1"

    @staticmethod
    def build():
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 1)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Augmentation(Piece):
    """huggingface/transformers#37932: ranks with one seed augment different samples in the same way."""

    cause = "random_augmentation"

    @staticmethod
    def step(model, batch):
        flips = torch.tensor([[random.choice((-1.0, 1.0))] for _ in batch["x"]])
        return F.mse_loss(model(batch["x"] * flips), batch["y"])


class BatchStatistics(Piece):
    """NVlabs/stylegan2-ada-pytorch's minibatch standard deviation: a feature of the rows of one rank."""

    cause = "other_output"
    where = "module 1"

    class Deviation(nn.Module):
        def forward(self, x):
            return x + x.std(0)

    @staticmethod
    def build():
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), BatchStatistics.Deviation(), nn.Linear(5, 1)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Codebook(Piece):
    """espnet/espnet#6284, ZhikangNiu/encodec-pytorch#15: a running mean of one rank's rows."""

    cause = "buffer_of_own_rows"
    where = "centre"

    @staticmethod
    def build():
        model = mlp()
        model.register_buffer("centre", torch.zeros(6))
        model = DistributedDataParallel(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    @staticmethod
    def step(model, batch):
        model.module.centre.mul_(0.9).add_(batch["x"].mean(0), alpha=0.1)
        return F.mse_loss(model(batch["x"]), batch["y"])


class ScaledLearningRate(Piece):
    """horovod/horovod#1619: the learning rate times the number of ranks, with the same global batch."""

    cause = "hyperparameters"

    @staticmethod
    def build():
        model = DistributedDataParallel(mlp())
        return model, torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())


# What is saved


class LostMomentum(Piece):
    """KempnerInstitute/KempnerForge#115: the momentum is not among what is loaded, and starts at zero again."""

    cause = "lost_state"
    where = "0.weight"
    options = {"world_sizes": (1, 2), "splits": ("even",), "resume": True}  # noqa: RUF012

    class Momentum(torch.optim.SGD):
        velocities = (0.0,) * 4

        def step(self):
            params = self.param_groups[0]["params"]
            self.velocities = [0.9 * velocity + p.grad for velocity, p in zip(self.velocities, params, strict=True)]
            for p, velocity in zip(params, self.velocities, strict=True):
                p.data.sub_(velocity, alpha=0.1)

    @staticmethod
    def build():
        model = DistributedDataParallel(mlp())
        return model, LostMomentum.Momentum(model.parameters(), lr=0.1)


class StateOfOtherRanks(Piece):
    """pytorch/ignite#2623, zhijian-liu/torchpack#18: each rank has the momentum of some parameters; rank 0's is saved."""

    cause = "lost_state"
    options = {"world_sizes": (1, 2), "splits": ("even",), "resume": True}  # noqa: RUF012

    class Divided(torch.optim.SGD):
        def step(self):
            for number, p in enumerate(self.param_groups[0]["params"]):
                owner = number % dist.get_world_size()
                state = self.state[p]
                state.setdefault("velocity", torch.zeros_like(p))
                if owner == dist.get_rank():
                    state["velocity"].mul_(0.9).add_(p.grad)
                    p.data.sub_(state["velocity"], alpha=0.1)
                dist.broadcast(p.data, owner)

    @staticmethod
    def build():
        model = DistributedDataParallel(mlp())
        return model, StateOfOtherRanks.Divided(model.parameters(), lr=0.1)


# What is reported


class AveragedMetric(Piece):
    """Lightning-AI/pytorch-lightning#681: a metric is averaged over ranks with different numbers of rows."""

    cause = "metric_of_own_rows"
    options = {"world_sizes": (1, 2, 3), "splits": ("even", "uneven")}  # noqa: RUF012

    @staticmethod
    def step(model, batch):
        y = model(batch["x"])
        accuracy = all_reduce(((y > 0) == (batch["y"] > 0)).float().mean(), "avg")
        return global_mean((y - batch["y"]).square()), {"accuracy": accuracy}


class LocalMetric(Piece):
    """pytorch/examples#905: every rank returns the accuracy of its own rows."""

    cause = "metric_of_own_rows"

    @staticmethod
    def step(model, batch):
        y = model(batch["x"])
        return F.mse_loss(y, batch["y"]), {"accuracy": ((y > 0) == (batch["y"] > 0)).float().mean()}


class LoggedLoss(Piece):
    """Lightning-AI/pytorch-lightning#2795: what is logged is summed over ranks and not divided."""

    cause = "other_loss"

    @staticmethod
    def step(model, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        return all_reduce(loss.detach())


BUGS = {
    name: piece
    for name, piece in list(globals().items())
    if isinstance(piece, type) and issubclass(piece, Piece) and piece.cause and piece.__module__ == __name__
}
