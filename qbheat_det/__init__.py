# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former, MF-DETR and QB-Heat on Detectron2.

    import qbheat_det

    detector = qbheat_det.load("retinanet/285M_bccd")  # a name, a file, a run's folder, .onnx
    found = detector.predict("photo.jpg", threshold=0.4)
    for box in found:
        print(box.class_name, box.score, box.xyxy)
    found.save("drawn.jpg")

    encoder = qbheat_det.load("distill/285M")
    vectors = encoder.embed("photos/")  # (N, D)

``load`` opens trained models: ``help(qbheat_det.api)`` lists their classes. ``select`` chooses the
images to label next. ``deploy`` makes a model faster. ``get_cfg`` and ``add_qbheat_config`` are the
config of Detectron2 with the keys of this package. ``model_zoo`` has configs and weights by name.

The import registers backbones, meta-architectures, the toy data set and the addresses of the model
zoo, and imports the modules in ``$QBHEAT_IMPORT``.
"""

import warnings
from typing import TYPE_CHECKING

from qbheat_det.core.environment import VERSION, import_own_modules, require_detectron2

require_detectron2()  # explains how to install it, before the imports that need it

with warnings.catch_warnings():
    # Detectron2 and fvcore use deprecated functions of torch when they are imported.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    from . import data, model_zoo, modeling
    from .config import add_qbheat_config, get_cfg
    from .deployment import deploy
    from .modeling import backbone, classification, dense, detr, pretrain  # noqa: F401

# Detectron2's anchors cause it once per process.
warnings.filterwarnings("ignore", message="torch.meshgrid: in an upcoming release")

__all__ = [
    "add_qbheat_config", "data", "deploy", "get_cfg", "load", "model_zoo", "modeling", "select",
]  # fmt: skip
__version__ = VERSION

if TYPE_CHECKING:  # type checkers would accept any name if they saw ``__getattr__``
    from .api import load
    from .labelling import select
else:

    def __getattr__(name: str) -> object:
        """Imports ``load`` and ``select`` at their first use, with export and drawing."""
        if name == "load":
            from .api import load

            return load
        if name == "select":
            from .labelling import select

            return select
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


import_own_modules()  # last: they may import all of the above
