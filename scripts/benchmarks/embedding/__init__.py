"""A training step of sharded tables, beside TorchRec and torch's own tables."""
