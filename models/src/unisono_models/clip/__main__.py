"""The commands of clip: `python -m unisono_models.clip COMMAND ...`."""

from unisono_models.training.commands import run_command

COMMANDS = {
    "train": ("unisono_models.clip.train", "Train a recipe, or continue a run; under torchrun on many ranks."),
    "search": ("unisono_models.clip.commands.search", "Search a trained model's images by words or by an image."),
    "serve": ("unisono_models.clip.commands.serve", "Open a page on this machine to search as you type."),
}

if __name__ == "__main__":
    run_command("unisono_models.clip", COMMANDS)
