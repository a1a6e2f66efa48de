"""Hashes never change: a checkpoint is worth nothing to a version that hashes in another way."""

import pytest
import torch

from unisono.embedding import hash_strings
from unisono.embedding.hashing import mix64_, mix_seed, splitmix64

GOLDEN = [-5426141060434712860, 3405396810240292928, 7825149098174313437, -3848761963538761655, 7497787021708494914]


def test_hash_strings_never_change():
    assert hash_strings(["", "a", "Übergröße", "🐙", "\ud800"]).tolist() == GOLDEN
    assert hash_strings([]).dtype == torch.int64 and hash_strings([]).shape == (0,)
    with pytest.raises(TypeError, match="hash_strings: texts='abc' must be a sequence"):
        hash_strings("abc")


def test_splitmix64_gives_its_published_numbers():
    """The first two outputs of the generator with seed 1234567, and what wraps around."""
    gamma = 0x9E3779B97F4A7C15 - 2**64
    states = torch.tensor([1234567, 1234567 + gamma])
    assert [x % 2**64 for x in splitmix64(states).tolist()] == [6457827717110365317, 3203168211198807973]
    assert torch.equal(mix64_(states + gamma), splitmix64(states))
    for state in (0, 1234567, 2**62, -(2**63)):
        assert mix_seed(state, 1) == splitmix64(torch.tensor(state)).item() % 2**64 >> 1
