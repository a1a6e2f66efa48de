"""One process with several devices: split, copy, gather, and run a module on all of them."""

from unisono.dataparallel.replicas.replicate import Replicas

__all__ = ["Replicas"]
