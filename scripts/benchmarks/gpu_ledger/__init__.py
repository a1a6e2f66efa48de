"""Counts of one GPU of many, beside open_clip, torch and TorchRec: no GPU needed, and no clock."""
