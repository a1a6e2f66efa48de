"""ContrastiveWarning: arguments of a loss that are legal, and almost surely a mistake."""

import warnings

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from unisono.collectives.checks import user_frame

_checked: set[str] = set()  # the losses whose first call was looked at: later calls read no value, so that no GPU is waited for


class ContrastiveWarning(UserWarning):
    """The arguments of a loss are legal, but almost surely a mistake: features that are not normalised, or a temperature
    that was given as scale. The first call of each loss in a process is looked at, on each rank alone.

    If the arguments are meant, switch it off:
        >>> import warnings
        >>> from unisono.contrastive import ContrastiveWarning
        >>> warnings.filterwarnings("ignore", category=ContrastiveWarning)
    """


def warn_of_likely_mistakes(function: str, x: Tensor, y: Tensor, scale: Tensor | float, scale_name: str) -> None:
    """Look at the first call of `function` that has rows and values to read. Nothing is communicated."""
    if torch.compiler.is_compiling() or function in _checked or not x.shape[0] or not all(map(_has_values, (x, y))):
        return
    _checked.add(function)
    value = float(scale.detach() if isinstance(scale, Tensor) else scale)
    if not value > 0:  # on a GPU, nobody has looked yet
        return
    factor = value if scale_name == "scale" else 1 / value
    lengths = [_typical_length(features) for features in (x, y)]
    logit = factor * lengths[0] * lengths[1]
    # A column more, for a log-q correction, may make normalised rows three times as long.
    if factor > 1 and any(length < 0.5 or length > 4 for length in lengths):
        mistake = (
            f"the features are not normalised: rows have lengths of about {lengths[0]:.3g} and {lengths[1]:.3g}, so that "
            f"logits reach about {logit:.3g}; give it torch.nn.functional.normalize(features, dim=1)"
        )
    elif factor < 1 and logit < 1:
        other = "temperature" if scale_name == "scale" else "scale"
        mistake = (
            f"{scale_name}={value:.3g} looks like a {other}: all logits lie within +-{logit:.3g}, so the loss can hardly "
            f"change; give it 1 / {value:.3g}"
        )
    else:
        return
    warnings.warn(
        f"{function}: {mistake}. If this is meant, ignore the category unisono.contrastive.ContrastiveWarning "
        f"(called at {user_frame()})",
        ContrastiveWarning,
        stacklevel=2,
    )


def _has_values(x: Tensor) -> bool:
    """Whether reading a value of `x` is possible: it is not while a graph is captured."""
    if type(x) not in (Tensor, nn.Parameter) or x.device.type == "meta":
        return False
    if torch._C._are_functorch_transforms_active() or _get_current_dispatch_mode() is not None:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _typical_length(x: Tensor) -> float:
    """The root mean square of the lengths of the rows."""
    lengths = torch.linalg.vector_norm(x.detach(), dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
    return float(lengths.square().mean().sqrt())
