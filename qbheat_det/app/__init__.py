# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The page of ``qbheat app``, which needs Gradio (the extra ``app``).

Visitors choose among the models of the command line and of the zoo. The page never opens a path
that a visitor typed.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from qbheat_det.core.errors import UserError

from .uploads import Models

__all__ = ["Models", "serve"]


def serve(
    weights: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    device: str | None = None,
) -> None:
    """Serves the page until the process is interrupted, and removes temporary files then.

    Args:
        weights: models besides those of the zoo: files, folders of runs, or names.
        host: address to listen on.
        port: by default the first free one from 7860.
        device: "cpu" or "cuda"; by default cuda where there is a GPU.

    Raises:
        UserError: Gradio is not installed, a model does not exist, or the port is taken.
    """
    models = Models(weights, device=device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # to remove the folder
    with tempfile.TemporaryDirectory(prefix="qbheat_app_") as folder:
        # Gradio reads these when it is imported. Uploads go to the folder, and no usage statistics
        # are sent.
        os.environ["GRADIO_TEMP_DIR"] = folder
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        try:
            from .page import launch
        except ImportError as error:
            raise UserError(
                f"the page needs Gradio ({error}): pip install 'gradio>=6.31,<7'"
            ) from error
        launch(models, Path(folder), host=host, port=port)
