# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Says in one sentence how Detectron2 reaches this machine, when it is not there."""

import importlib.util

# Not a requirement in setup.py: the package index has no release under the name detectron2.
_HOW_TO_INSTALL = (
    "qbheat_det needs Detectron2, which this Python does not have: in a checkout of qbheat_det "
    "run `python tools/install_detectron2.py` (pure Python, from the package index), or build "
    "the official one with `pip install --no-build-isolation "
    "'git+https://github.com/facebookresearch/detectron2.git'`"
)


def require_detectron2() -> None:
    """Checks that Detectron2 can be found, without importing it.

    Raises:
        ImportError: it cannot; the sentence names the two ways to install it.
    """
    spec = importlib.util.find_spec("detectron2")
    # A folder named detectron2, such as a checkout beside the script, is found without an origin.
    if spec is None or spec.origin is None:
        raise ImportError(_HOW_TO_INSTALL, name="detectron2")
