"""The generator and the discriminator, and what is made with a trained generator."""
