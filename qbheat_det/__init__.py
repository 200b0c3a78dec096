# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former, MF-DETR and QB-Heat on Detectron2.

Importing the package registers its backbones, meta-architectures, the toy data set and the
addresses of the model zoo's weights, and imports what ``$QBHEAT_IMPORT`` names; nothing else
happens.
"""

import warnings
from typing import TYPE_CHECKING

from qbheat_det.core.environment import VERSION, import_own_modules, require_detectron2

require_detectron2()  # a sentence that says how to get it, before the imports that need it

with warnings.catch_warnings():
    # Detectron2 and fvcore use what new versions of torch deprecate, as soon as they are imported.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    from . import data, model_zoo, modeling
    from .config import add_qbheat_config, get_cfg
    from .deployment import deploy
    from .modeling import backbone, classification, dense, detr, pretrain  # noqa: F401

# Detectron2's anchors call it in a way that new versions of torch warn of, once a process.
warnings.filterwarnings("ignore", message="torch.meshgrid: in an upcoming release")

if TYPE_CHECKING:
    from .api import load
    from .labelling import select

__all__ = [
    "add_qbheat_config", "data", "deploy", "get_cfg", "load", "model_zoo", "modeling", "select",
]  # fmt: skip
__version__ = VERSION


def __getattr__(name: str) -> object:
    """Imports ``load`` and ``select`` when first asked for: they bring export and drawing."""
    if name == "load":
        from .api import load

        return load
    if name == "select":
        from .labelling import select

        return select
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


import_own_modules()  # last: they may import all of the above
