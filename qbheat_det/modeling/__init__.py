# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models; ``import qbheat_det`` imports all packages below, which registers their classes.

This package itself imports none of them, so that any other can import ``modeling.contracts``.
"""
