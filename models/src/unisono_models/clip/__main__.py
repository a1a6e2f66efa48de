"""python -m unisono_models.clip {train,search,serve} ..."""

from unisono_models.training.commands import run_command

run_command(
    "unisono_models.clip",
    {
        "train": ("unisono_models.clip.train", "Train a model. Start it by torchrun to use several ranks."),
        "search": ("unisono_models.clip.commands.search", "Search images by text with the model of a finished run."),
        "serve": ("unisono_models.clip.commands.serve", "Serve the search as a web page and as JSON."),
    },
)
