"""Are trees split, modules replicated and gradients synced as fast as by torch itself? Run this file; `--help` says how."""

if __name__ == "__main__":  # every fresh rank imports this file again, and has no use for matplotlib and the like
    import tyro
    from dataparallel_run import main

    tyro.cli(main)
