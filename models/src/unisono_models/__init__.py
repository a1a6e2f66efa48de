"""Three reference models on unisono's packages, and the training code that they share."""
