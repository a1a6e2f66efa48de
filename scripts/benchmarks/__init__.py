"""Benchmarks against other libraries: one harness, and one file or folder for each benchmark. See README.md."""
