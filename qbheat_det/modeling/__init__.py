# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models; importing this package registers backbones and meta-architectures."""

from . import backbone

__all__ = ["backbone"]
