"""TorchRec's tables on one rank of many, where TorchRec imports."""

import importlib.util


def torchrec_is_missing() -> str:
    """Say why TorchRec cannot be counted here; an empty string if it can."""
    if importlib.util.find_spec("torchrec") is None:
        return "it does not import beside this torch (`./scripts/bench embedding` compares with it, with an older torch)"
    return ""
