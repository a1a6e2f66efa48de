"""Compute the losses tile by tile, without ever holding the whole matrix of logits."""
