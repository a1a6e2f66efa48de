"""The commands of gan: `python -m unisono_models.gan COMMAND ...`."""

from unisono_models.training.commands import run_command

COMMANDS = {
    "train": ("unisono_models.gan.train", "Train a recipe, or continue a run; under torchrun on many ranks."),
    "evaluate": ("unisono_models.gan.commands.evaluate", "Compute the metrics of a finished run again."),
    "sample": ("unisono_models.gan.commands.sample", "Generate images with the generator of a finished run."),
}

if __name__ == "__main__":
    run_command("unisono_models.gan", COMMANDS)
