# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data: the built-in toy set, annotation files of one's own, and dataset mappers.

Importing this package registers ``qbheat_toy_train`` and ``qbheat_toy_val``.
"""

from .toy import TOY_SETS, ToySpec, get_cache_dir, prepare_toy_set, register_toy_set

__all__ = ["TOY_SETS", "ToySpec", "get_cache_dir", "prepare_toy_set", "register_toy_set"]

for _name, _spec in TOY_SETS.items():
    register_toy_set(_name, _spec)
