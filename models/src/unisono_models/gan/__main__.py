"""The commands of the GAN: python -m unisono_models.gan COMMAND …"""

from unisono_models.training.commands import run_command

COMMANDS = {
    "train": ("unisono_models.gan.train", "Train a GAN (with torchrun on several ranks)."),
    "sample": ("unisono_models.gan.commands.sample", "Generate images with a finished run."),
    "evaluate": ("unisono_models.gan.commands.evaluate", "Compute the metrics of a finished run again."),
}

if __name__ == "__main__":
    run_command("unisono_models.gan", COMMANDS)
