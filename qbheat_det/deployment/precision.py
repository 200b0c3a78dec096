# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whether a device multiplies bfloat16 natively, and a model's parts under autocast."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By their names in ``MODEL.DEPLOY.PRECISION``."""

# Linux's names: AVX-512 and AMX products of bfloat16, and Arm's.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def supports_bfloat16(device: torch.device) -> bool:
    """Returns whether a device multiplies bfloat16 natively, rather than by emulation."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(read_cpu_flags() & _BF16_FLAGS)


def read_cpu_flags() -> set[str]:
    """Returns the processor's features by Linux's names; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    fields = (line.partition(":") for line in lines)
    found = (value for name, _, value in fields if name.strip().lower() in ("flags", "features"))
    return set(next(found, "").split())


def return_float32(parts: Iterable[nn.Module]) -> None:
    """Adds hooks that cast what modules return in half precision to float32.

    Under autocast the parts then compute in bfloat16, and what follows them, such as decoding
    boxes, in float32. Integers and masks are left as they are.
    """
    for part in parts:
        part.register_forward_hook(_to_float32)


def _to_float32(_: nn.Module, __: Any, output: Any) -> Any:
    return tree_map(_widen, output)


def _widen(x: Any) -> Any:
    is_half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if is_half else x
