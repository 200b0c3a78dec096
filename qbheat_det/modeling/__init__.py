# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models. ``import qbheat_det`` imports all subpackages, which registers their classes.

``qbheat_det.modeling`` itself does not import its subpackages, so that any other package can import
``modeling.contracts`` without circular imports.
"""
