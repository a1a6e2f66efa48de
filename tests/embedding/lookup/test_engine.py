"""Prefetch: a batch that was started ahead gives the same results and errors."""

import threading
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.embedding.reference import ROWS
from tests.embedding.test_collection import make_pair
from unisono.embedding import SGD, EmbeddingCollection, Ragged, Table
from unisono.embedding.lookup import engine, input_dist
from unisono.embedding.lookup.input_dist import AgreedRequests
from unisono.embedding.ragged import as_ragged


def prefetch_is_taken_by_all_ranks_or_none() -> None:
    """If one rank called with other features, the ranks hung."""
    collection = make_pair("row")
    batch = {"a": torch.tensor([1, 9]), "b": torch.tensor([0, 4])}
    other = {"a": torch.tensor([2]), "b": torch.tensor([3])}
    collection.prefetch(batch)
    assert collection._prefetcher.take(dict(batch), collection._read(batch)[0]) is not None  # the same tensors in another dict
    collection.prefetch(batch)
    out = collection(batch if dist.get_rank() else other)  # this hung
    assert len(out["a"]) == (2 if dist.get_rank() else 1)
    collection.prefetch({"a": torch.tensor([ROWS]), "b": torch.tensor([3])})
    collection.prefetch(batch)  # the error of a batch that nobody wants any more is nobody's
    assert len(collection(batch)["a"]) == 2
    weights = torch.ones(2, requires_grad=True)
    weighted = make_pair("table")
    features = batch | {"a": Ragged(torch.tensor([1, 9]), torch.tensor([0, 2]), weights)}
    with torch.no_grad():
        weighted.prefetch(features)
    weighted(features)["a"].sum().backward()
    assert weights.grad is not None


def a_bad_prefetched_batch_raises_when_it_is_used() -> None:
    tables = [Table("user", 7, 2), Table("item", 9, 4, ["seen"], mode="mean"), Table("word", 6, 2, mode=None)]
    good = {"user": torch.tensor([[1, 5], [2, 2]]), "seen": torch.tensor([[1, 2], [3, 3]]), "word": torch.tensor([4, 0])}
    collection = EmbeddingCollection(tables, plan="row")
    batch = {**good, "user": torch.tensor([77])} if dist.get_rank() == 1 else {**good}
    collection.prefetch(batch)
    with pytest.raises(IndexError, match="rank 1: id 77"):
        collection(batch)
    for begun in (batch, good):  # one that nobody looks up in the end has no say
        collection.prefetch(begun)
        assert collection(good)["user"].shape == (2, 2)


def ids_changed_after_prefetch_are_looked_up() -> None:
    """The rows of the old ids were returned."""
    rank = dist.get_rank()
    collection = make_pair("row")
    for changed in ("", "values", "offsets", "weights"):
        ragged = Ragged(torch.tensor([1, 9, 4]), torch.tensor([0, 2, 3]), torch.ones(3))
        batch = {"a": ragged, "b": torch.tensor([[0, 1], [4, 1]]).T}  # a column of memory is a bag: reading it makes a copy
        collection.prefetch(batch)
        if rank == 1:  # on one rank only: all drop what they started
            batch["b"].fill_(2)
            if changed:
                getattr(ragged, changed)[1] = 1
        found = collection(batch)
        expected = collection(
            {name: Ragged(*(x.clone() for x in as_ragged(bags) if x is not None)) for name, bags in batch.items()}
        )
        assert all(torch.equal(found[name], expected[name]) for name in "ab")
    with torch.inference_mode():
        batch = {"a": torch.tensor([1, 9]), "b": torch.tensor([0, 4])}
    with torch.no_grad():
        collection.prefetch(batch)
        assert len(collection(batch)["a"]) == 2


def a_scheduler_between_prefetch_and_call_is_no_mismatch() -> None:
    """The thread read the learning rate when it came to run: on one rank before the scheduler, on another after it."""
    rank = dist.get_rank()
    collection = make_pair("row", optimizer=SGD(lr=0.1))
    batch = {"a": torch.tensor([1, 9]), "b": torch.tensor([0, 4])}
    agree = engine.agree_on_requests

    def late(*args: Any) -> Any:
        time.sleep(0.3 * rank)
        return agree(*args)

    with mock.patch.object(engine, "agree_on_requests", late):
        collection.prefetch(batch)
        collection.optimizer.param_groups[0]["lr"] = 0.05
        collection(batch)["a"].sum().backward()


def test_a_scheduler_between_prefetch_and_call_is_no_mismatch(ranks):
    ranks(a_scheduler_between_prefetch_and_call_is_no_mismatch, world_size=2)


class FakeStream:
    """Stands for torch.Stream, which there is not without an accelerator."""

    def __init__(self, *_: object) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def record_event(self) -> str:
        return "done"


def an_accelerator_sends_in_the_order_of_the_program() -> None:
    """Messages between accelerators from two threads could come in another order on each rank, and wait for each other."""
    rank, main = dist.get_rank(), FakeStream()
    accelerator = {"current_stream": lambda _: main, "set_stream": lambda _: None, "set_device_index": lambda _: None}
    threads: list[tuple[str, str]] = []
    recorded = []

    def spy(module: object, name: str) -> Any:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            threads.append((name, "main" if threading.current_thread() is threading.main_thread() else "prefetch"))
            return original(*args, **kwargs)

        return mock.patch.object(module, name, call)

    collection = make_pair("row")
    batch = {"a": torch.tensor([1, 9])[rank:], "b": torch.tensor([0, 4])[rank:]}
    expected = collection(batch)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine, "is_on_host", return_value=False))
        stack.enter_context(mock.patch.multiple(torch.accelerator, **accelerator))
        stack.enter_context(mock.patch.object(torch, "Stream", FakeStream))
        stack.enter_context(mock.patch.object(AgreedRequests, "record_stream", lambda *x: recorded.append(x)))
        stack.enter_context(spy(input_dist, "all_to_all_single"))
        stack.enter_context(spy(input_dist, "join_features"))
        collection.prefetch(batch)
        found = collection(batch)
    assert all(torch.equal(found[name], expected[name]) for name in "ab")
    assert threads == [("join_features", "prefetch"), ("all_to_all_single", "main")]
    assert main.waited == ["done"] and recorded[0][1] is main


def test_an_accelerator_sends_in_the_order_of_the_program(ranks):
    ranks(an_accelerator_sends_in_the_order_of_the_program, world_size=2)


def test_ids_changed_after_prefetch_are_looked_up(ranks):
    ranks(ids_changed_after_prefetch_are_looked_up, world_size=2)


def test_prefetch_is_taken_by_all_ranks_or_none(ranks):
    ranks(prefetch_is_taken_by_all_ranks_or_none, world_size=3)


def test_a_bad_prefetched_batch_raises_when_it_is_used(ranks):
    ranks(a_bad_prefetched_batch_raises_when_it_is_used, world_size=2)
