# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tests of what can be seen of runs."""
