# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The page of ``qbheat app``, which needs Gradio (the extra ``app``).

Visitors choose among the models that the command line names and those of the zoo, so that the
page never opens a path that somebody typed.
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
    """Serves the page until the process is interrupted; temporary files are removed then.

    Args:
        weights: own models beside those of the zoo: files, folders of runs, or names.
        host: address to listen on.
        port: None takes the first free one from 7860.
        device: "cpu" or "cuda"; None takes the GPU if there is one.

    Raises:
        UserError: Gradio is not installed, a model does not exist, or the port is taken.
    """
    models = Models(weights, device=device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # else the folder would stay
    with tempfile.TemporaryDirectory(prefix="qbheat_app_") as folder:
        # Gradio reads these when it is imported: uploads go to the folder, and no statistics of
        # use are sent anywhere.
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
