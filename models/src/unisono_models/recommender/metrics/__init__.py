"""Exact metrics over the rows of all ranks."""
