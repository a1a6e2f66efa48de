"""Images to train on: readers of datasets, their conditions, and the batches of each step."""
