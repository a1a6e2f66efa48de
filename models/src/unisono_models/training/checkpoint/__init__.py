"""Checkpoints: what they hold, how they are written, verified and loaded."""
