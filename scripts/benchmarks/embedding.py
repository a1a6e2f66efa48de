"""Are the sharded tables faster, leaner and smaller than TorchRec's? Run this file; `--help` says how."""

if __name__ == "__main__":  # every fresh rank imports this file again, and has no use for matplotlib and the like
    import tyro
    from embedding_run import main

    tyro.cli(main)
