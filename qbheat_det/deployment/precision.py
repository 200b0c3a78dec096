# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whether bfloat16 is arithmetic of the device, or only a slower way to write float32."""

import platform
from pathlib import Path

import torch

from qbheat_det.core.errors import UserError

PRECISIONS = ("float32", "bfloat16")
# As Linux names them: products of bfloat16 in AVX-512 and AMX; Arm's own.
_NATIVE_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def choose_precision(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Returns the type to compute in, and a sentence on it.

    Args:
        wanted: "float32" or "bfloat16".
        device: where the model lives.

    Raises:
        UserError: ``wanted`` is neither.
    """
    check_precision(wanted)
    has_it = multiplies_bfloat16(device)
    if wanted == "bfloat16":
        return torch.bfloat16, "as asked for" if has_it else "slower, for this device emulates it"
    other = "this device multiplies bfloat16 too, which rounds more: precision='bfloat16' takes it"
    return torch.float32, other if has_it else "this device does not multiply bfloat16"


def check_precision(wanted: str) -> None:
    """Raises a UserError for what is none of ``PRECISIONS``."""
    if wanted not in PRECISIONS:
        raise UserError(f"precision is one of {', '.join(PRECISIONS)}, not '{wanted}'")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is arithmetic of a device."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(processor_flags() & _NATIVE_FLAGS)


def processor_flags() -> set[str]:
    """Returns what the processor can do, as Linux names it; nothing elsewhere."""
    for line in _processor_lines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return set(value.split())
    return set()


def processor_name() -> str:
    """Returns the model of the processor, and of what it can do a list."""
    names = ("model name", "cpu implementer", "cpu part", "cpu family", "model", "stepping")
    found = dict.fromkeys(
        line.strip()
        for line in _processor_lines()
        if line.partition(":")[0].strip().lower() in names
    )
    return " ".join([platform.machine(), platform.processor(), *found, *sorted(processor_flags())])


def _processor_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
