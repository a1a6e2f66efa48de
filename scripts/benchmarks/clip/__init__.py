"""A training step of CLIP, beside open_clip's own."""
