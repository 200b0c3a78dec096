# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dense detectors; importing this package registers them."""

from .detectors import SyncFCOS, SyncRetinaNet, build_fcos_head

__all__ = ["SyncFCOS", "SyncRetinaNet", "build_fcos_head"]
