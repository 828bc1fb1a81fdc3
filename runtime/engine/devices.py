"""The devices that a model is computed on, by name."""

from collections.abc import Sequence

import torch

from runtime.config import ServedConfig
from runtime.errors import CheckpointError


def choose_device(device: str | torch.device) -> torch.device:
    """Return a device by name.

    Raises:
        CheckpointError: no such device, or none that this torch can use.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise CheckpointError(f"device={device}: write auto, cpu, cuda or cuda:1") from error
    if chosen.type not in ("cpu", "cuda"):
        raise CheckpointError(f"device={device}: experts are served on cpu and cuda only")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(
            f"device={device}: this torch sees no CUDA device; use device=cpu, or install a CUDA "
            "build of torch"
        )
    return chosen


def primary_device(config: ServedConfig) -> torch.device:
    """Return the device of all weights but experts: plain Transformers is compared there."""
    return choose_device(config.devices[0] if config.devices else config.device)


def choose_devices(devices: str | Sequence[str | torch.device]) -> list[torch.device]:
    """Return devices by name, none for an empty list; `cpu,cpu` are two with an arena each.

    Raises:
        CheckpointError: one is not available, or they are of different kinds.
    """
    named = devices.split(",") if isinstance(devices, str) and devices else devices
    chosen = [
        choose_device(device.strip() if isinstance(device, str) else device) for device in named
    ]
    if len({device.type for device in chosen}) > 1:
        raise CheckpointError(
            f"devices={','.join(map(str, chosen))}: an expert's output would depend on where it is "
            "computed; name devices of one kind, such as cuda:0,cuda:1"
        )
    # `cuda` and `cuda:0` are the same device but not equal.
    return [
        torch.device(device.type, device.index or 0) if device.type == "cuda" else device
        for device in chosen
    ]
