"""Are the exact losses as fast as their matmuls, and small? Run this file; `--help` says how."""

if __name__ == "__main__":  # every fresh rank imports this file again, and has no use for matplotlib and the like
    import tyro
    from contrastive_run import main

    tyro.cli(main)
