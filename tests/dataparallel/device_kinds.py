"""The devices on which tests of one process run: several CPU replicas, or the simulated devices of pretend_device."""

import pytest
import torch

KINDS = ["cpu", "pretend"]


def devices_of(kind: str, request: pytest.FixtureRequest, number: int = 4) -> list[torch.device]:
    if kind == "cpu":
        return [torch.device("cpu")] * number
    request.getfixturevalue("pretend")
    return [torch.device("pretend", index) for index in range(number)]
