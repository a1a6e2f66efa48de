"""The commands of the recommender: `python -m unisono_models.recommender COMMAND ...`."""

from unisono_models.training.commands import run_command

COMMANDS = {
    "train": ("unisono_models.recommender.train", "Train a recipe, or continue a run; under torchrun on many ranks."),
    "evaluate": ("unisono_models.recommender.commands.evaluate", "Test the model of a finished run again."),
    "export": (
        "unisono_models.recommender.commands.export",
        "Write programs for one process, with quantized tables, and say what that costs.",
    ),
    "recommend": ("unisono_models.recommender.commands.recommend", "Print the items that a user might like."),
}

if __name__ == "__main__":
    run_command("unisono_models.recommender", COMMANDS)
