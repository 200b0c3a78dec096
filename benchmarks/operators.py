# Copyright (c) qbheat_det contributors. Apache-2.0.
"""PyTorch's operators by kind, and the seconds that a profile found in each kind."""

import re
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

KINDS: dict[str, str] = {
    "convolutions and matrix products": r"conv|aten::(mm|addmm|bmm|baddbmm|linear)$|mkl",
    "attention": r"scaled_dot_product|flash|softmax|_AttendInParts",
    "norms": r"(batch|layer|group)_norm",
    "activations": r"gelu|relu|threshold|hardtanh|clamp|sigmoid|hardsigmoid|_TwoSlopes|tanh",
    "optimizer and clipping": r"^Optimizer|_fused_|_foreach|vector_norm|addcmul_|addcdiv_",
    "dropout's numbers": r"bernoulli|random_|dropout",
    "images": r"DataLoader|upsample_bilinear2d_aa|decode",
}
"""Regular expressions of operators' names, tried in this order."""
REST = "other passes over tensors, and Python"


def kind_of(name: str) -> str:
    """Returns the kind of an operator, as a profile names it."""
    return next((kind for kind, names in KINDS.items() if re.search(names, name)), REST)


def seconds_by_kind(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Returns the seconds that a step spends in each kind of operator, its callees left out.

    Args:
        step: makes one.
        steps: how many to take the mean of.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step()
    found = dict.fromkeys([*KINDS, REST], 0.0)
    for event in recorded.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / 1e6 / steps
    return found
