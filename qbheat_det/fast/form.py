# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The base class of fast forms."""

from typing import cast

from torch import nn


class FastForm:
    """Base of a subclass of a layer that computes the same, up to rounding, in less time."""

    @classmethod
    def is_faster_for(cls, layer: nn.Module) -> bool:
        """Whether the form computes this ``layer`` in less time on this machine."""
        return True

    @classmethod
    def of(cls, layer: nn.Module) -> nn.Module:
        """Returns the fast form of ``layer``: same settings, parameters, buffers and children."""
        form = cls.__new__(cls)
        vars(form).update(vars(layer))
        return cast(nn.Module, form)
