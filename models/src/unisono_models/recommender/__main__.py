"""python -m unisono_models.recommender {train,evaluate,recommend} ..."""

from unisono_models.training.commands import run_command

run_command(
    "unisono_models.recommender",
    {
        "train": ("unisono_models.recommender.train", "Train a model. Start it by torchrun to use several ranks."),
        "evaluate": ("unisono_models.recommender.commands.evaluate", "Measure the model of a finished run."),
        "recommend": (
            "unisono_models.recommender.commands.recommend",
            "Recommend items to users with the model of a finished run.",
        ),
    },
)
