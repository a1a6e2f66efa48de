"""What all models share around their training step: the loop, ranks, checkpoints, run directories, configs."""
