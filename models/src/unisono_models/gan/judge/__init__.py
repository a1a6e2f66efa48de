"""The judge: a classifier trained on the run's own pictures, by whose features generated ones are measured."""
