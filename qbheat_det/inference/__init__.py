# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction: from images in any form, through trained weights or an exported file, to results."""
