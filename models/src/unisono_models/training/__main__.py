"""The commands for runs of all models: `python -m unisono_models.training COMMAND ...`."""

from unisono_models.training.commands import run_command

COMMANDS = {
    "launch": ("unisono_models.training.distributed.torchrun", "Train a model on this machine: MODEL [--nproc N] [RECIPE] ..."),
    "simulate": (
        "unisono_models.training.simulate.command",
        "Say what a rank of many GPUs would need and do in a step: MODEL [RECIPE] [--hosts H] [--gpus G] ...",
    ),
    "reproduce": ("unisono_models.training.run.reproduce", "Repeat a run from its directory and compare the numbers."),
    "compare": ("unisono_models.training.run.compare", "Print the metrics of several runs, of any models, as one table."),
}

if __name__ == "__main__":
    run_command("unisono_models.training", COMMANDS)
