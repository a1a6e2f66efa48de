"""Is a training step of the recommender faster than with TorchRec's tables? Run this file; `--help` says how."""

if __name__ == "__main__":  # every fresh rank imports this file again, and has no use for matplotlib and the like
    import tyro
    from recommender_run import main

    tyro.cli(main)
