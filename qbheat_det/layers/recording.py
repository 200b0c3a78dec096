# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whether somebody reads the operations of a forward pass rather than their results."""

import torch
from torch.jit._trace import is_tracing


def is_recorded() -> bool:
    """Whether a compiler or an exporter reads what is computed, and wants plain formulas."""
    return torch.compiler.is_compiling() or is_tracing()
