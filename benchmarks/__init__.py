# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Benchmarks of this package against peers; ``python benchmarks/run.py --list`` lists them."""
