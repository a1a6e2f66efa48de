"""Simulate a training step of one rank of many, without GPUs: memory, FLOPs, bytes, and a model of the time."""
