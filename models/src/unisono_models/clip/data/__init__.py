"""Datasets of images and captions: readers of files, the emoji, and the loader."""
