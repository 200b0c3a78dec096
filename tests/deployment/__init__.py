# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tests of trained models in their fastest form."""
