# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models; importing this package registers backbones and meta-architectures."""

from . import backbone, meta_arch

__all__ = ["backbone", "meta_arch"]
