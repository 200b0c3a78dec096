# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tests on a second device, which needs no GPU."""
