"""Metrics of generated images, exact over the features of all ranks."""
