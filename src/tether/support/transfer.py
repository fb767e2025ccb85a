"""Copies to a GPU that the host does not wait for."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on a device; to a GPU through pinned memory, without waiting.

    A copy from ordinary memory would wait for everything that the GPU has been given so far.
    """
    device = torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
