# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models of one's own, known to every tool: ``QBHEAT_IMPORT`` names the modules that hold them."""

import importlib
import os


def import_own_modules() -> None:
    """Imports the modules in ``$QBHEAT_IMPORT``, names with commas between, in their order.

    It is an environment variable because configs may come from strangers, and code may not.

    Raises:
        ImportError: one of them is not found; the sentence names it and says where to put it.
    """
    for name in filter(None, map(str.strip, os.environ.get("QBHEAT_IMPORT", "").split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0] and error.name != name:
                raise  # something that the module itself imports
            raise ImportError(
                f"QBHEAT_IMPORT names the module '{name}', which Python does not find: put the "
                "folder that holds it on PYTHONPATH, or unset QBHEAT_IMPORT",
                name=name,
            ) from error
