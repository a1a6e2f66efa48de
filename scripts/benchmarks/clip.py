"""Is a whole training step faster than open_clip's with the same towers, and smaller? Run this file; `--help` says how."""

if __name__ == "__main__":  # every fresh rank imports this file again, and has no use for matplotlib and the like
    import tyro
    from clip_run import main

    tyro.cli(main)
