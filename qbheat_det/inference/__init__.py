# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs trained weights or exported files on images, and draws and writes the results."""
