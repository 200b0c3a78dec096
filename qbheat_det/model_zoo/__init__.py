# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained weights by name, as in Detectron2's ``model_zoo``; see docs/zoo.md.

::

    import qbheat_det.model_zoo as zoo

    zoo.list("retinanet/*")
    model = zoo.get("retinanet/285M_bccd")
"""

from .index import Metric, ZooEntry, find_entry, get_address, get_config_file, list_entries
from .index import list_names as list
from .sources import ZooWeights, get, get_checkpoint, get_config

__all__ = [
    "Metric",
    "ZooEntry",
    "ZooWeights",
    "find_entry",
    "get",
    "get_address",
    "get_checkpoint",
    "get_config",
    "get_config_file",
    "list",
    "list_entries",
]
