# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Measurements of this package beside its peers; ``python benchmarks/run.py --list`` names them."""
