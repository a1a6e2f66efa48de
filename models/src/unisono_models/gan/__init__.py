"""A GAN whose discriminator sees the gathered batch: what it learns does not depend on how many ranks train it."""
