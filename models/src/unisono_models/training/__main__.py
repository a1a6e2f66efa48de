"""python -m unisono_models.training {reproduce,compare} ..."""

from unisono_models.training.commands import run_command

run_command(
    "unisono_models.training",
    {
        "reproduce": ("unisono_models.training.run.reproduce", "Repeat a run from its directory and compare the numbers."),
        "compare": ("unisono_models.training.run.compare", "Print the metrics of several finished runs as one table."),
    },
)
