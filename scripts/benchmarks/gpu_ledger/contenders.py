"""What is counted: jobs of one rank of many, and the contenders that do each of them."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn  # before there is a group: its functions have it as a default
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contrastive import open_clip_losses
from benchmarks.dataparallel import resnet50_sizes
from benchmarks.embedding.workload import DIM, FEATURES, Setting, Workload
from unisono.collectives import all_gather, simulate_rank
from unisono.collectives.ledger.fake_values import known_values
from unisono.collectives.ledger.hardware import H100_SXM
from unisono.contrastive import clip_loss, sigmoid_loss
from unisono.dataparallel import GradientSync, SyncBatchNorm
from unisono.embedding import EmbeddingCollection, Ragged, RowwiseAdagrad, Table

RANK = 1
HAS_TRITON = importlib.util.find_spec("triton") is not None


class Size(NamedTuple):
    """What one rank has of the global batch: rows, and their width. It is counted up to `most_ranks`."""

    rows: int
    width: int = 0
    most_ranks: int = 1 << 20


class Step(NamedTuple):
    """`run` is called twice and keeps no gradient. `given` are the inputs and the parameters, which all contenders have."""

    run: Callable[[], None]
    given: list[Tensor]


class Contender(NamedTuple):
    """`make` builds the job inside the simulation."""

    make: Callable[..., Step]
    triton: bool = True  # whether losses and tables may take their Triton kernels
    data: Callable[[Size], Any] | None = None  # makes real data before the simulation, in which integers keep their values


class Job(NamedTuple):
    """What all contenders do, `sizes` by name, and the text of its section."""

    contenders: Mapping[str, Contender]
    sizes: Mapping[str, Size]
    about: str


def count(contender: Contender, size: Size, world_size: int) -> dict[str, Any]:
    """Count the second step of one rank of `world_size`: the first one may allocate buffers and ask once for all."""
    data = [] if contender.data is None else [contender.data(size)]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_triton(contender.triton))
        ledger = stack.enter_context(simulate_rank(world_size, RANK))
        if data:
            stack.enter_context(known_values(ledger))
        step = contender.make(size, *data)
        given = sum(x.numel() * x.element_size() for x in step.given)
        ledger.reset()
        step.run()
        syncs_of_first_step = len(ledger.host_syncs)
        ledger.reset()
        step.run()
        time = ledger.time(H100_SXM)
        traffic = ledger.traffic
        return {
            "world_size": world_size,
            "kernels_forward": sum(c.kernels for name, c in ledger.phases.items() if name != "backward"),
            "kernels_backward": sum(c.kernels for name, c in ledger.phases.items() if name == "backward"),
            "kernels": ledger.kernels,
            "flops": {str(dtype).removeprefix("torch."): flops for dtype, flops in sorted(ledger.flops.items(), key=str)},
            "bytes_touched": ledger.bytes_touched,
            "collectives": {name: op.calls for name, op in sorted(ledger.collectives.items())},
            "collective_calls": traffic.calls,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.received,
            "host_syncs": len(ledger.host_syncs),
            "host_syncs_of_first_step": syncs_of_first_step,
            "host_sync_lines": sorted({str(sync) for sync in ledger.host_syncs}),
            "peak_bytes": ledger.peak_memory - given,
            "model_lower_bound_ms": time.lower_bound * 1e3,
            "model_estimate_ms": time.estimate * 1e3,
        }


@contextmanager
def _triton(allowed: bool) -> Iterator[None]:
    old = os.environ.get("UNISONO_TRITON")
    os.environ["UNISONO_TRITON"] = "" if allowed else "0"
    try:
        yield
    finally:
        del os.environ["UNISONO_TRITON"]
        if old is not None:
            os.environ["UNISONO_TRITON"] = old


def clear(leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


# Losses: features of 16 bits, forward and backward to both, the scale, and the bias of the sigmoid loss.


def loss_of(make: Callable[[], Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]) -> Callable[[Size], Step]:
    def prepare(size: Size) -> Step:
        loss = make()
        x, y = (torch.empty(size.rows, size.width, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "xy")
        scale, bias = (torch.ones((), device="cuda").requires_grad_() for _ in "sb")

        def step() -> None:
            loss(x, y, scale, bias).backward()
            clear(leaves)

        leaves = [x, y, scale, bias]
        return Step(step, leaves)

    return prepare


def our_clip(**options: Any) -> Callable[[Size], Step]:
    return loss_of(lambda: lambda x, y, scale, bias: clip_loss(x, y, scale, **options))


def our_sigmoid(**options: Any) -> Callable[[Size], Step]:
    return loss_of(lambda: lambda x, y, scale, bias: sigmoid_loss(x, y, scale, bias, **options))


def open_clip_local() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    loss = open_clip_losses().ClipLoss(local_loss=True, gather_with_grad=True, **ranks)
    return lambda x, y, scale, bias: loss(x, y, scale)


def siglip() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    loss = open_clip_losses().SigLipLoss(rank=dist.get_rank(), world_size=dist.get_world_size())
    return lambda x, y, scale, bias: loss(x, y, scale, bias)


def with_triton(name: str, make: Callable[..., Callable[[Size], Step]]) -> dict[str, Contender]:
    contenders = {
        f"unisono {name}, torch tiles": Contender(make(), triton=False),
        f"unisono {name}, torch tiles, fast": Contender(make(precision="fast"), triton=False),
    }
    if HAS_TRITON:
        contenders |= {
            f"unisono {name}, Triton": Contender(make()),
            f"unisono {name}, Triton, fast": Contender(make(precision="fast")),
        }
    return contenders


# Gathers: forward and backward.


def gathered(gather: Callable[[list[Tensor]], list[Tensor]], leaves: int) -> Callable[[Size], Step]:
    def prepare(size: Size) -> Step:
        x = [torch.empty(size.rows, size.width, device="cuda").requires_grad_() for _ in range(leaves)]

        def step() -> None:
            outputs = gather(x)
            torch.autograd.backward(outputs, [output.detach() for output in outputs])
            clear(x)

        return Step(step, x)

    return prepare


def torch_gather(x: list[Tensor]) -> list[Tensor]:
    return [torch.cat(dist_nn.all_gather(leaf, dist.group.WORLD)) for leaf in x]


def functional_gather(x: list[Tensor]) -> list[Tensor]:
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    return [all_gather_tensor_autograd(leaf, 0, dist.group.WORLD) for leaf in x]


# Gradients of ResNet-50's parameters: what syncing adds to a backward that only fills them.


class Fill(torch.autograd.Function):
    """Gives each parameter a gradient, at the price of one fill."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(p)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Fills(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.empty(n, device="cuda")) for n in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for p in self.parts:
            x = Fill.apply(x, p)  # type: ignore[no-untyped-call]
        return x


def filled(how: str) -> Callable[[Size], Step]:
    def prepare(size: Size) -> Step:
        model: nn.Module = Fills(resnet50_sizes())
        sync = GradientSync(model.parameters(), compare_weights=False)
        if how.startswith("DDP"):
            model = DistributedDataParallel(model, gradient_as_bucket_view=how == "DDP, views")
        x = torch.ones((), device="cuda", requires_grad=True)

        def step() -> None:
            loss = model(x)
            if how == "overlap":
                with sync.overlap():
                    loss.backward()
            else:
                loss.backward()
            if how == "call":
                sync()
            clear(leaves)

        leaves = [x, *model.parameters()]
        return Step(step, leaves)

    return prepare


# Batch normalization: forward and backward of one layer of ResNet-50.


def normalized(module: Callable[[int], nn.Module]) -> Callable[[Size], Step]:
    def prepare(size: Size) -> Step:
        norm = module(size.width).cuda()
        x = torch.empty(size.rows, size.width, 56, 56, device="cuda").requires_grad_()

        def step() -> None:
            y = norm(x)
            y.backward(y.detach())
            clear(leaves)

        leaves = [x, *norm.parameters()]
        return Step(step, leaves)

    return prepare


# Embedding tables: the 26 tables of the embedding benchmark, forward, backward and the update.


@cache
def zipf_ids(size: Size) -> list[Tensor]:
    return Workload(Setting(batch=size.rows), range(RANK, RANK + 1), processes=1).ids[0]


def tables(plan: str) -> Callable[[Size, list[Tensor]], Step]:
    def prepare(size: Size, ids: list[Tensor]) -> Step:
        setting = Setting(batch=size.rows)
        collection = EmbeddingCollection(
            [Table(f"t{k}", rows, DIM, features=[FEATURES[k]], mode="sum") for k, rows in enumerate(setting.rows)],
            plan=plan,
            optimizer=RowwiseAdagrad(lr=0.02),
            batch_size=size.rows,
            device="cuda",
        )
        held = [
            x.to_local() if isinstance(x, DTensor) else x for x in collection.state_dict().values() if isinstance(x, Tensor)
        ]
        bags = torch.arange(size.rows + 1)
        batch = {
            feature: Ragged(found.cuda(), (bags * pooling).cuda())
            for feature, found, pooling in zip(FEATURES, ids, setting.poolings, strict=True)
        }

        def step() -> None:
            pooled = list(collection(batch).values())
            torch.autograd.backward(pooled, [each.detach() for each in pooled])

        return Step(step, held)

    return prepare


LOSS_SIZES = {"64 rows of 512": Size(64, 512), "4,096 rows of 1,024": Size(4096, 1024, most_ranks=64)}
JOBS: dict[str, Job] = {
    "CLIP loss": Job(
        {"open_clip ClipLoss, local": Contender(loss_of(open_clip_local))} | with_triton("clip_loss", our_clip),
        LOSS_SIZES,
        "bfloat16 features. open_clip keeps logits of 16 bits; ours have 32. In the backward `exact` splits the slopes in two "
        "numbers of 16 bits and multiplies twice, `fast` rounds them to one.",
    ),
    "Sigmoid loss": Job(
        {"open_clip SigLipLoss": Contender(loss_of(siglip))} | with_triton("sigmoid_loss", our_sigmoid),
        LOSS_SIZES,
        "As above. SigLipLoss passes the features around a ring, two neighbours at a time.",
    ),
    "Gather of a tensor": Job(
        {
            "torch.distributed.nn.functional.all_gather, cat": Contender(gathered(torch_gather, 1)),
            "torch all_gather_tensor_autograd": Contender(gathered(functional_gather, 1)),
            "unisono all_gather": Contender(gathered(lambda x: [all_gather(x[0])], 1)),
        },
        {"1,024 rows of 1,024": Size(1024, 1024)},
        "float32. torch's gathers need equal sizes on all ranks; all_gather without `sizes` asks the ranks for theirs.",
    ),
    "Gather of a tree": Job(
        {
            "torch.distributed.nn.functional.all_gather, cat": Contender(gathered(torch_gather, 2)),
            "torch all_gather_tensor_autograd": Contender(gathered(functional_gather, 2)),
            "unisono all_gather": Contender(gathered(all_gather, 2)),
        },
        {"2 leaves, 1,024 rows of 1,024": Size(1024, 1024)},
        "One call for both leaves; torch's functions are called once for each.",
    ),
    "Gradients": Job(
        {
            "nothing synced": Contender(filled("nothing")),
            "torch DDP": Contender(filled("DDP")),
            "torch DDP, gradient_as_bucket_view": Contender(filled("DDP, views")),
            "unisono GradientSync, overlap()": Contender(filled("overlap")),
            "unisono GradientSync, after the backward": Contender(filled("call")),
        },
        {"ResNet-50": Size(1)},
        "A backward that fills the gradients of ResNet-50's 161 parameters and computes nothing else, and their mean over the "
        "ranks. DDP is the ledger's stand-in, with torch's buckets of 25 MB: its C++ reducer needs a real device.",
    ),
    "Batch normalization": Job(
        {
            "torch SyncBatchNorm": Contender(normalized(nn.SyncBatchNorm)),
            "unisono SyncBatchNorm": Contender(normalized(SyncBatchNorm)),
        },
        {"32 images, 256 channels of 56 x 56": Size(32, 256)},
        "float32, one layer, forward and backward, training mode.",
    ),
    "Embedding tables": Job(
        {
            "unisono EmbeddingCollection, rows": Contender(tables("row"), data=zipf_ids),
            "unisono EmbeddingCollection, rows, no Triton": Contender(tables("row"), triton=False, data=zipf_ids),
            "unisono EmbeddingCollection, tables": Contender(tables("table"), data=zipf_ids),
            "unisono EmbeddingCollection, tables, no Triton": Contender(tables("table"), triton=False, data=zipf_ids),
        },
        {"26 tables, 64 samples": Size(64)},
        "The tables of the embedding benchmark, with ids by Zipf's law; the other ranks have copies of this rank's ids.",
    ),
}
