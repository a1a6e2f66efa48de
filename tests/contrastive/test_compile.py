"""torch.compile(fullgraph=True) of a training step with a loss gives the values and gradients of eager mode."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

from tests.contrastive.loss_cases import CASES, SPLITS, close, differentiable, global_batch, gradients, local_batch
from unisono import contrastive
from unisono.contrastive import ClipLoss, SigmoidLoss

COMPILED = ["clip_everything", "clip_one_way", "sigmoid_ids_masked_weights", "ntxent", "supcon_weights"]


def compiled_losses_match_eager(backend):
    sizes, rank = SPLITS[dist.get_world_size()], dist.get_rank()
    torch._dynamo.reset()
    mine = differentiable(local_batch(global_batch(sum(sizes)), sizes, rank))

    def step(given):
        return [CASES[name](given, getattr(contrastive, CASES[name].function)) for name in COMPILED]

    compiled = torch.compile(step, fullgraph=True, backend=backend)(mine)  # one graph for all, because compiling takes seconds
    for name, loss, expected in zip(COMPILED, compiled, step(mine), strict=True):
        close(loss.detach(), expected.detach(), 1e-12, name)
        expected_grads = gradients(expected, mine)
        for key, grad in gradients(loss, mine, retain_graph=True).items():
            close(grad, expected_grads[key], 1e-11, f"{name}: gradient of {key}")


def test_compiled_losses_match_eager(ranks):
    ranks(compiled_losses_match_eager, "aot_eager", world_size=2, timeout=240)


def compiled_with_sizes():
    """No tensor of the graph is on another device than the features: a CPU tensor would keep it out of CUDA graphs."""
    torch._dynamo.reset()
    sizes = SPLITS[dist.get_world_size()]
    mine = differentiable(local_batch(global_batch(sum(sizes)), sizes, dist.get_rank()))
    seen, sizes_in_graph = [], []

    def backend(graph, inputs):
        def compiler(module, _):
            for node in module.graph.nodes:
                tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
                seen.extend(tensors)
                sizes_in_graph.extend(t for t in tensors if t.dtype == torch.int64 and t.shape == (len(sizes),))
            return make_boxed_func(module.forward)

        return aot_autograd(fw_compiler=compiler)(graph, inputs)

    def step(given):
        return contrastive.clip_loss(given["x"], given["y"], 3.0, sizes=sizes, weights=given["weights"])

    loss, expected = torch.compile(step, fullgraph=True, backend=backend)(mine), step(mine)
    close(loss.detach(), expected.detach(), 1e-12, "loss")
    truth = gradients(expected, mine)
    for key, grad in gradients(loss, mine).items():
        close(grad, truth[key], 1e-11, f"gradient of {key}")
    assert seen and not sizes_in_graph, "the given sizes are a tensor on the CPU"


def test_given_sizes_are_not_returned_on_the_cpu(ranks):
    ranks(compiled_with_sizes, world_size=2, timeout=240)


def test_gradients_have_the_strides_that_inductor_was_promised():
    torch._dynamo.reset()
    a, y, w = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((6, 8), (8, 6), (8,)))

    def step(a, y, w):
        x = (a * 2).T
        weights = w.square()
        return contrastive.sigmoid_loss(x, y * 3, 2.0, -1.0, weights=weights) + contrastive.clip_loss(x, y * 3, 2.0)

    expected = torch.autograd.grad(step(a, y, w), [a, y, w])
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(a, y, w), [a, y, w])
    for grad, truth in zip(found, expected, strict=True):
        close(grad, truth, 1e-11, "gradient")


def compiled_step(backend):
    torch._dynamo.reset()
    rank = dist.get_rank()
    torch.manual_seed(0)
    tower = torch.nn.Linear(6, 4).double()
    losses = torch.nn.ModuleDict({"clip": ClipLoss(), "sigmoid": SigmoidLoss()}).double()

    def step(images, texts, ids):
        x, y = F.normalize(tower(images), dim=1), F.normalize(tower(texts), dim=1)
        return losses["clip"](x, y, ids=ids) + losses["sigmoid"](x, y, ids=ids)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    parameters = [*tower.parameters(), *losses.parameters()]
    for rows in (3 + rank, 5, 4 - rank):  # another size in every step
        generator = torch.Generator().manual_seed(10 * rows + rank)
        images, texts = (torch.randn(rows, 6, generator=generator, dtype=torch.float64) for _ in "xy")
        ids = torch.randint(0, 4, (rows,), generator=generator)
        expected = step(images, texts, ids)
        expected_grads = torch.autograd.grad(expected, parameters)
        loss = compiled(images, texts, ids)
        close(loss.detach(), expected.detach(), 1e-12, f"{rows} rows")
        for grad, truth in zip(torch.autograd.grad(loss, parameters), expected_grads, strict=True):
            close(grad, truth, 1e-11, f"gradient, {rows} rows")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_step_matches_eager(ranks, backend):
    ranks(compiled_step, backend, world_size=2, timeout=240)
