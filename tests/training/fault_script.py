"""A small real run, and the faults that the tests in distributed/ inject: test_faults.py and test_two_hosts.py start it.

torchrun --standalone --nproc-per-node 2 tests/training/fault_script.py --dir /tmp/run --fault kill:1:7
"""

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives import global_mean
from unisono_models.training.checkpoint import manifest
from unisono_models.training.checkpoint.manager import Checkpoints
from unisono_models.training.distributed.launch import start_ranks
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.randomness import normal, uniform
from unisono_models.training.run.preemption import StopSignal

SEED, BATCH, WIDTH = 3, 50, 32  # 50 samples: uneven over 3 ranks


def main() -> None:
    args = parse()
    if args.linger:
        threading.Thread(target=time.sleep, args=(600,)).start()
    with (
        start_ranks(timeout=args.timeout) as ranks,
        StopSignal() as stop_signal,
        Watchdog(ranks, timeout=args.patience) as watchdog,
        Checkpoints(args.dir / "checkpoints", timeout=args.timeout) as checkpoints,
    ):
        torch.manual_seed(SEED)
        net = Mlp()
        model = DistributedDataParallel(net) if dist.is_initialized() else net
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        first, _ = checkpoints.load(model, optimizer) or (0, None)
        if ranks.first:
            print(f"starts at step {first} on {ranks.world_size} ranks", flush=True)
        for step in range(first, args.steps):
            suffer(args, ranks.rank, step, checkpoints)
            index = torch.arange(BATCH * step, BATCH * (step + 1)).tensor_split(ranks.world_size)[ranks.rank]
            x = normal(SEED, "x", step, index, (16,))
            y = x[:, :1].sin() + 0.1 * normal(SEED, "noise", step, index, (1,))
            kept = uniform(SEED, "dropout", step, index, (WIDTH,)) >= 0.1
            loss = global_mean((model(x, kept / 0.9) - y).square().mean(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if ranks.first:
                with open(args.dir / "losses.jsonl", "a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.item(), "ranks": ranks.world_size}) + "\n")
            watchdog.beat(step + 1)
            stop = stop_signal.received_by_any_rank()
            if stop or (step + 1) % args.every == 0 or step + 1 == args.steps:
                checkpoints.save(step + 1, model, optimizer, {"step": step + 1})
            if stop:
                break
            time.sleep(args.pace)
    if ranks.first:
        print(f"ends after step {step + 1}{f', after {stop_signal.received}' if stop_signal.received else ''}", flush=True)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) * mask)


def suffer(args: argparse.Namespace, rank: int, step: int, checkpoints: Checkpoints) -> None:
    """The faults that are due on this rank: each once in the life of the run directory."""
    for fault in args.fault:
        kind, victim, when = fault.split(":")
        done = args.dir / f"{kind}.pid"
        if int(victim) == rank and int(when) == step and not done.exists():
            done.write_text(str(os.getpid()))
            checkpoints.wait()  # so that the test knows which ones are there
            happen(kind)


def happen(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "sleep":
        time.sleep(600)
    elif kind == "raise":
        raise ValueError("a fault of its own")
    elif kind == "commit":  # the next checkpoint has its data, and its COMMIT is not written yet
        write = manifest.atomic_write

        def die_instead(path: Path, data: bytes) -> None:
            if path.name == manifest.COMMIT:
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, data)

        manifest.atomic_write = die_instead
    else:
        raise ValueError(f"--fault {kind}: no such kind")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=30, help="of collectives")
    parser.add_argument("--patience", type=float, default=30, help="of the watchdog")
    parser.add_argument("--pace", type=float, default=0, help="seconds to sleep after each step")
    parser.add_argument("--linger", action="store_true", help="with a thread that does not let the interpreter exit")
    parser.add_argument("--fault", action="append", default=[], help="kind:rank:step")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
