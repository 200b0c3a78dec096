# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Errors, files, seeds and text: helpers for all other subpackages."""
