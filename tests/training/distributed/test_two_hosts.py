"""Two network namespaces as two hosts: over a slow link training gives the same numbers, over a cut one it ends and says so."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.training.torchrun import LAUNCH, Launch, free_port, losses, torchrun

STEPS = 12
TORCHRUN = ("-m", "torch.distributed.run")
_numbers = itertools.count()


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)


class TwoHosts:
    """Hosts 0 and 1, with a link of their own between them."""

    def __init__(self) -> None:
        # 15 characters are all that the name of a link may have.
        self.name = f"u{os.getpid()}n{next(_numbers)}"
        for host in (0, 1):
            sh(f"ip netns add {self.name}-{host}")
        sh(f"ip link add {self.name}-0 netns {self.name}-0 type veth peer name {self.name}-1 netns {self.name}-1")
        for host in (0, 1):
            self.on(host, f"ip addr add 10.77.0.{host + 1}/24 dev {self.name}-{host}")
            for link in ("lo", f"{self.name}-{host}"):
                self.on(host, f"ip link set {link} up")

    def on(self, host: int, command: str) -> None:
        sh(f"ip netns exec {self.name}-{host} {command}")

    def slow_down(self, rate: str) -> None:
        for host in (0, 1):
            self.on(host, f"tc qdisc add dev {self.name}-{host} root tbf rate {rate} burst 4kb latency 500ms")

    def cut(self) -> None:
        self.on(0, f"ip link set {self.name}-0 down")

    def remove(self) -> None:
        for host in (0, 1):  # the links go with them
            subprocess.run(["ip", "netns", "delete", f"{self.name}-{host}"], capture_output=True, timeout=30)

    @contextmanager
    def train(self, directory: Path, *arguments: str, program: tuple[str, str] = TORCHRUN) -> Iterator[list[Launch]]:
        """torchrun on each host, one rank each. Host 0 holds torchrun's store."""
        endpoint, launches = f"--rdzv-endpoint=10.77.0.1:{free_port()}", []
        with ExitStack() as stack:
            for host in (0, 1):
                options = [
                    *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint, "--rdzv-id=small"),
                    *(f"--rdzv-conf=is_host={str(host == 0).lower()}", f"--local-addr=10.77.0.{host + 1}"),
                ]
                launch = torchrun(
                    directory,
                    *arguments,
                    options=options,
                    name=f"host-{host}",
                    env={"GLOO_SOCKET_IFNAME": f"{self.name}-{host}"},
                    prefix=["ip", "netns", "exec", f"{self.name}-{host}"],
                    program=program,
                )
                launches.append(stack.enter_context(launch))
            yield launches


def why_not() -> str:
    """What this machine lacks, or nothing."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)}: install iproute2"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    hosts = None
    try:
        hosts = TwoHosts()
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces here: {error.stderr.decode().strip()}"
    finally:
        if hosts is not None:
            hosts.remove()
    return ""


def with_slow_link(directory: Path) -> list[str]:
    hosts = TwoHosts()
    try:
        hosts.slow_down("1mbit")
        with hosts.train(directory, f"--steps={STEPS}") as launches:
            assert [launch.end() for launch in launches] == [0, 0], launches[0].output
            return [launch.output for launch in launches]
    finally:
        hosts.remove()


def with_cut_link(directory: Path) -> list[str]:
    hosts = TwoHosts()
    try:
        options = ("--steps=1000", "--pace=0.1", "--timeout=8", "--patience=100")
        with hosts.train(directory, *options, program=("-c", LAUNCH)) as launches:
            launches[0].wait_for_step(STEPS - 1)
            hosts.cut()
            for launch in launches:
                launch.wait_for("Timed out waiting 8000ms")  # what gloo says at its timeout
                launch.wait_until(partial(names_who_is_missing, launch), "who is missing")
            assert [launch.end() for launch in launches] == [1, 1]  # torchrun itself would wait for its store for minutes
            return [launch.output for launch in launches]
    finally:
        hosts.remove()


def names_who_is_missing(launch: Launch) -> bool:
    return "missing: rank" in launch.output or "does not answer" in launch.output


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    with ThreadPoolExecutor(2) as pool:
        slow, cut = pool.submit(with_slow_link, folder / "slow"), pool.submit(with_cut_link, folder / "cut")
        yield {"slow": (slow.result(), losses(folder / "slow")), "cut": (cut.result(), losses(folder / "cut"))}


def test_slow_link_gives_the_same_losses(ended):
    (outputs, slow), (_, fast) = ended["slow"], ended["cut"]
    assert sum("starts at step 0 on 2 ranks" in output for output in outputs) == 1  # rank 0's host
    assert [line["step"] for line in slow] == list(range(STEPS))
    assert slow == fast[:STEPS]


def test_cut_link_is_named_on_both_hosts_at_the_timeout(ended):
    outputs, lines = ended["cut"]
    assert len(lines) >= STEPS  # it worked until then
    assert sum("missing: rank" in output for output in outputs) == 1, outputs  # where torchrun's store is
    assert sum("does not answer" in output for output in outputs) == 1, outputs
