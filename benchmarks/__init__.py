# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Benchmarks of this package against peers; ``python -m benchmarks.run --list`` lists them."""
