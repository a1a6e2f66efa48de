"""python -m unisono_models.recommender {train,evaluate,recommend} ..."""

from unisono_models.training.commands import run_command

run_command(
    "unisono_models.recommender",
    {
        "train": ("unisono_models.recommender.train", "Train a recipe, in one process or on many ranks by torchrun."),
        "evaluate": ("unisono_models.recommender.commands.evaluate", "Test the model of a finished run again."),
        "recommend": ("unisono_models.recommender.commands.recommend", "Print the items that a user might like."),
    },
)
