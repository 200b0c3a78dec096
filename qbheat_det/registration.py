# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Registers this package with Detectron2 and timm when it is imported.

These are backbones, meta-architectures, built-in data sets, and addresses such as ``qbheat://``.
The modules in ``$QBHEAT_IMPORT`` are imported as well. See ``core/lazy.py``.
"""

import warnings

from qbheat_det.core.environment import import_own_modules, require_detectron2

require_detectron2()  # raises an error that explains the installation

with warnings.catch_warnings():
    # Detectron2 and fvcore use deprecated functions of torch when they are imported.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    import qbheat_det.core.path_handlers
    import qbheat_det.data
    import qbheat_det.model_zoo
    import qbheat_det.modeling.backbone
    import qbheat_det.modeling.classification
    import qbheat_det.modeling.detr
    import qbheat_det.modeling.fcos
    import qbheat_det.modeling.joined
    import qbheat_det.modeling.pretrain
    import qbheat_det.modeling.retinanet  # noqa: F401

# Detectron2's anchor generator causes this warning once per process.
warnings.filterwarnings("ignore", message="torch.meshgrid: in an upcoming release")

import_own_modules()  # last, because these modules may import this package
