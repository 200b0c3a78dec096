# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Configuration: the keys that this package adds to Detectron2's, and safe loading of YAML."""

from .defaults import NETWORK_KEYS, add_qbheat_config, get_cfg
from .loading import (
    Rules,
    at_least,
    check_values,
    dump_config,
    find_memory_format,
    get_config_path,
    get_value,
    load_config,
    one_of,
    refuse_bad_values,
    with_values,
)
from .missing_keys import configurable, reads_our_keys
from .pixels import Pixels, warn_of_other_pixels
from .unread import describe_unread, find_unread, warn_of_unread

__all__ = [
    "NETWORK_KEYS",
    "Pixels",
    "Rules",
    "add_qbheat_config",
    "at_least",
    "check_values",
    "configurable",
    "describe_unread",
    "dump_config",
    "find_memory_format",
    "find_unread",
    "get_cfg",
    "get_config_path",
    "get_value",
    "load_config",
    "one_of",
    "reads_our_keys",
    "refuse_bad_values",
    "warn_of_other_pixels",
    "warn_of_unread",
    "with_values",
]
