# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The config of trained weights, where tools look for it; it is a matter of the weights."""

from qbheat_det.checkpoint.run_config import load_embedded_config, load_run_config

__all__ = ["load_embedded_config", "load_run_config"]
