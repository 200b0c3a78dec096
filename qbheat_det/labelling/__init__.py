# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Few boxes, many images: which images to label next, and which labels are probably wrong."""
