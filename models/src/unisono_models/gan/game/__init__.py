"""The game the networks play, over the global batch: rows of a step, losses, penalties."""
