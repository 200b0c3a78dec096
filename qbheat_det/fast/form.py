# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The base class of fast forms."""

from typing import cast

from torch import nn


class FastForm:
    """Base of fast forms: subclasses of a layer that compute the same in less time.

    Results are equal up to rounding.
    """

    @classmethod
    def is_faster_for(cls, layer: nn.Module) -> bool:
        """Returns whether this form is faster than ``layer`` on this machine."""
        return True

    @classmethod
    def of(cls, layer: nn.Module) -> nn.Module:
        """Returns the fast form of ``layer``, which shares its parameters, buffers and children."""
        form = cls.__new__(cls)  # without __init__, which would allocate new parameters
        vars(form).update(vars(layer))
        return cast(nn.Module, form)
