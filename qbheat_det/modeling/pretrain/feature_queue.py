# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The dictionary of MoCo: keys of the last batches, the oldest of which give way to new ones.

"Momentum Contrast for Unsupervised Visual Representation Learning", arXiv:1911.05722, Sec. 3.2.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FeatureQueue(nn.Module):
    """K keys of D numbers, first in, first out.

    Keys of a step are held back until the step is over, so that it makes no difference whether it
    sees its images at once or in parts. Keys and place are state, and a checkpoint holds them; what
    is held back between the parts of a step is not. Until K keys were seen, what is left of the
    beginning is random directions, the same in every process.
    """

    def __init__(self, *, size: int, dim: int) -> None:
        """
        Args:
            size: K.
            dim: D.

        Raises:
            ValueError: one of them is not positive.
        """
        super().__init__()
        if min(size, dim) < 1:
            raise ValueError(f"a queue of {size} keys of {dim} numbers cannot be built")
        generator = torch.Generator().manual_seed(0)
        random = F.normalize(torch.randn(size, dim, generator=generator), dim=1)
        self.register_buffer("keys", random)
        self.register_buffer("next", torch.zeros((), dtype=torch.long))
        self.keys: Tensor  # (K, D)
        self.next: Tensor  # where the oldest key is
        self._held: list[Tensor] = []

    def hold(self, keys: Tensor) -> None:
        """Keeps keys (M, D) until ``push_held``.

        Raises:
            RuntimeError: more were held than the queue has place for.
        """
        self._held.append(keys.detach())
        if sum(map(len, self._held)) > len(self.keys):
            raise RuntimeError(
                f"more than the {len(self.keys)} keys of the queue came in one step: either "
                "MODEL.MOCO.QUEUE_SIZE is below SOLVER.IMS_PER_BATCH, or nothing calls after_step"
            )

    @torch.no_grad()
    def push_held(self) -> None:
        """Puts the keys that were held into the place of the oldest ones."""
        if not self._held:
            return
        keys = torch.cat(self._held)
        self._held.clear()
        # By an index on the device: a slice would wait for the number that it begins with.
        place = (self.next + torch.arange(len(keys), device=keys.device)) % len(self.keys)
        self.keys.index_copy_(0, place, keys.to(self.keys.dtype))
        self.next.add_(len(keys)).remainder_(len(self.keys))
