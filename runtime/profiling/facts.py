"""Versions and hardware, as far as serving depends on them."""

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from predictors.networks import kernels
from predictors.origin import package_versions, read_processor_name
from runtime.accelerator import describe_accelerator, list_accelerators
from runtime.compiled import is_compiled
from runtime.engine.memory import available_memory_bytes

PACKAGES = ("moecast", "torch", "transformers", "onnxruntime", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages; None where one is not installed."""
    return {"python": platform.python_version(), **package_versions(PACKAGES)}


def hardware(folder: Path) -> dict[str, Any]:
    """Processor, memory, GPUs, and the disk that `folder` is on; sizes in bytes.

    `network_kernels`: instructions that compiled predictors use; None: they are not compiled.
    `compiled_core`: whether the policy core runs compiled.
    """
    disk = shutil.disk_usage(folder)
    return {
        "system": platform.platform(),
        "processor": read_processor_name(),
        "cores": count_usable_cores(),
        "threads_used": torch.get_num_threads(),
        "network_kernels": None if kernels is None else kernels.INSTRUCTIONS[0],
        "compiled_core": is_compiled(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "available_memory_bytes": available_memory_bytes(),
        "gpus": list_gpus(),
        "disk_bytes": disk.total,
        "disk_free_bytes": disk.free,
    }


def count_usable_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def list_gpus() -> list[dict[str, Any]]:
    """Name and memory of each accelerator."""
    return [describe_accelerator(device) for device in list_accelerators()]
