"""A training step of the recommender, beside the same model on TorchRec's tables."""
