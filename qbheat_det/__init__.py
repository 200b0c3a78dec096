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
``train`` trains a detector on your boxes and opens it, and ``join`` joins detectors of one frozen
encoder. ``select`` chooses the images to label next.
``deploy`` returns a faster form of a model. ``get_cfg`` returns Detectron2's default config with
the keys of this package, and ``add_qbheat_config`` adds these keys to a config. ``model_zoo``
provides configs and weights by name.

Importing the package registers its backbones, meta-architectures and built-in data sets, and the
``qbheat://`` addresses of the model zoo: at once if Detectron2 or timm has been imported, or else
as soon as one of them is imported or needed. An exported file needs neither of them, nor PyTorch.
The registration also imports the modules in ``$QBHEAT_IMPORT``. If the home folder cannot be
written, caches are in a temporary folder (see ``core/caches.py``).
"""

from typing import TYPE_CHECKING

from qbheat_det.core.caches import use_writable_caches
from qbheat_det.core.environment import VERSION
from qbheat_det.core.lazy import import_name, register, register_when_needed
from qbheat_det.core.other_names import name_attribute

use_writable_caches()  # before libraries read the variables

__all__ = [
    "Detector", "Encoder", "add_qbheat_config", "data", "deploy", "get_cfg", "join", "load",
    "model_zoo", "modeling", "select", "train",
]  # fmt: skip
__version__ = VERSION

if TYPE_CHECKING:  # with ``__getattr__``, type checkers would accept any name
    from . import data, model_zoo, modeling
    from .api import Detector, Encoder, join, load, train
    from .config import add_qbheat_config, get_cfg
    from .deployment import deploy
    from .labelling import select
else:
    # The modules of names that are imported at first use.
    _MODULES = {
        "Detector": "qbheat_det.api",
        "Encoder": "qbheat_det.api",
        "add_qbheat_config": "qbheat_det.config",
        "deploy": "qbheat_det.deployment",
        "get_cfg": "qbheat_det.config",
        "join": "qbheat_det.api",
        "load": "qbheat_det.api",
        "select": "qbheat_det.labelling",
        "train": "qbheat_det.api",
    }
    _WITHOUT_PYTORCH = ("Detector", "load")

    def __getattr__(name: str) -> object:
        is_special = name.startswith("__")  # asked for by Python itself
        if name not in _WITHOUT_PYTORCH and not is_special:
            register()  # which imports most subpackages
        if name in _MODULES:
            return import_name(__name__, name, _MODULES)
        if name in globals():
            return globals()[name]
        raise name_attribute(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


register_when_needed()
