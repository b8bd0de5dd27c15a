"""Numbers of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of (nested) lists, on `device`.

    A copy from ordinary memory would wait until the device has done all that is queued; from pinned
    memory it is queued behind that, and the host goes on.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return torch.tensor(values, dtype=dtype)
    pinned = kind == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)
