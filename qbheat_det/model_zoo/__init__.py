# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained weights by name, as Detectron2's ``model_zoo`` has them.

::

    import qbheat_det.model_zoo as zoo

    zoo.list("retinanet/*")
    model = zoo.get("retinanet/285M_aquarium")

See docs/zoo.md.
"""

from .addresses import ZooWeights
from .index import Figure, Fingerprint, OutputPrint, ZooEntry, find_entry, list_entries, load_index
from .models import get, get_address, get_checkpoint, get_config, get_config_file
from .models import list_names as list
from .timm_tags import timm_name

__all__ = [
    "Figure",
    "Fingerprint",
    "OutputPrint",
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
    "load_index",
    "timm_name",
]
