"""The commands for runs of all models: `python -m unisono_models.training COMMAND ...`."""

from unisono_models.training.commands import run_command

COMMANDS = {
    "launch": ("unisono_models.training.distributed.torchrun", "Train a model on this machine: MODEL [--nproc N] [RECIPE] ..."),
    "reproduce": ("unisono_models.training.run.reproduce", "Repeat a run from its directory and compare the numbers."),
    "compare": ("unisono_models.training.run.compare", "Print the metrics of several runs, of any models, as one table."),
}

if __name__ == "__main__":
    run_command("unisono_models.training", COMMANDS)
