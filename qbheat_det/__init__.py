# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former, MF-DETR and QB-Heat on Detectron2.

    import qbheat_det

    detector = qbheat_det.load("retinanet/285M_bccd")  # or a file, or a run's folder
    found = detector.predict("photo.jpg", threshold=0.4)
    for box in found:
        print(box.class_name, box.score, box.xyxy)
    found.save("drawn.jpg")

    encoder = qbheat_det.load("distill/285M")
    vectors = encoder.embed("photos/")  # (N, D)

``load`` opens trained weights as a ``Detector`` or an ``Encoder`` (see ``qbheat_det.api``).
``train`` trains a detector on your boxes and opens it. ``select`` chooses the images to label next.
``deploy`` returns a faster form of a model. ``get_cfg`` returns Detectron2's default config with
the keys of this package, and ``add_qbheat_config`` adds these keys to a config. ``model_zoo``
provides configs and weights by name.

Importing the package registers its backbones, meta-architectures and built-in data sets, and the
``qbheat://`` addresses of the model zoo. It also imports the modules in ``$QBHEAT_IMPORT``. If the
home folder cannot be written, caches are in a temporary folder (see ``core/caches.py``).
"""

import importlib
import warnings
from typing import TYPE_CHECKING

from qbheat_det.core.caches import use_writable_caches
from qbheat_det.core.environment import VERSION, import_own_modules, require_detectron2
from qbheat_det.core.other_names import name_attribute

use_writable_caches()  # before libraries read the variables
require_detectron2()  # raises an error that explains the installation

with warnings.catch_warnings():
    # Detectron2 and fvcore use deprecated functions of torch when they are imported.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    from . import data, model_zoo, modeling
    from .config import add_qbheat_config, get_cfg
    from .deployment import deploy
    from .modeling import backbone, classification, detr, fcos, pretrain, retinanet  # noqa: F401

# Detectron2's anchor generator causes this warning once per process.
warnings.filterwarnings("ignore", message="torch.meshgrid: in an upcoming release")

__all__ = [
    "Detector", "Encoder", "add_qbheat_config", "data", "deploy", "get_cfg", "load", "model_zoo",
    "modeling", "select", "train",
]  # fmt: skip
__version__ = VERSION

if TYPE_CHECKING:  # with ``__getattr__``, type checkers would accept any name
    from .api import Detector, Encoder, load, train
    from .labelling import select
else:
    # The modules of names that are imported at first use, because they import export and drawing.
    _MODULES = {
        "Detector": "api",
        "Encoder": "api",
        "load": "api",
        "select": "labelling",
        "train": "api",
    }

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        raise name_attribute(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


import_own_modules()  # last, because these modules may import this package
