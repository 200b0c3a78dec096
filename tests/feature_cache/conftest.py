# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs on tiny data, as in ``tests/engine``."""

from tests.engine.conftest import _forget_runs, tiny_data, train_afresh

__all__ = ["_forget_runs", "tiny_data", "train_afresh"]
