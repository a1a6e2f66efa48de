"""A contrastive model of images and captions. See README.md."""
