"""The devices that a model is computed on, by name."""

from collections.abc import Sequence

import torch

from runtime.accelerator import (
    ACCELERATOR_TYPES,
    find_accelerator,
    is_accelerator,
    list_accelerators,
)
from runtime.config import ServedConfig
from runtime.errors import CheckpointError

AUTO_TYPES = ("cuda", "xpu")
"""Accelerators that `auto` chooses. MPS shares the CPU's memory: experts would be there twice."""


def choose_device(device: str | torch.device) -> torch.device:
    """Return a device by name.

    Raises:
        CheckpointError: no such device, or none that this torch can use.
    """
    if device == "auto":
        accelerator = find_accelerator()
        return (
            accelerator
            if accelerator is not None and accelerator.type in AUTO_TYPES
            else torch.device("cpu")
        )
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise CheckpointError(
            f"device={device}: write auto, cpu, cuda, xpu, mps, or one of several such as cuda:1"
        ) from error
    if chosen.type != "cpu" and not is_accelerator(chosen):
        raise CheckpointError(
            f"device={device}: experts are served on cpu, {', '.join(ACCELERATOR_TYPES)} only"
        )
    if is_accelerator(chosen):
        _check_present(chosen)
    return chosen


def _check_present(device: torch.device) -> None:
    present = [known for known in list_accelerators() if known.type == device.type]
    if not present:
        others = ", ".join(["cpu", *map(str, list_accelerators())])
        raise CheckpointError(
            f"device={device}: this torch sees no {device.type.upper()} device, but {others}; use "
            f"device=cpu, or install a build of torch for {device.type.upper()}"
        )
    if device.index is not None and device.index >= len(present):
        raise CheckpointError(
            f"device={device}: this machine has {', '.join(map(str, present))} only"
        )


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
        torch.device(device.type, device.index or 0) if is_accelerator(device) else device
        for device in chosen
    ]
