# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The web page of ``qbheat app``, which needs Gradio (the extra ``app``).

Users choose among the models in the model zoo and on the command line. They can select images to
label, and check labels, from the folders on the command line. They cannot open other paths on the
server.
"""

import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from qbheat_det.api import end_if_imported_by_child
from qbheat_det.core.errors import UserError
from qbheat_det.core.termination import end_process

from .review import Pools
from .uploads import Models

__all__ = ["Models", "serve"]


def serve(
    weights: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    device: str | None = None,
    images: Sequence[str] = (),
    data: str | None = None,
    suspects: Sequence[str] = (),
) -> None:
    """Serves the page until the process is interrupted, and then removes temporary files.

    Args:
        weights: models to offer in addition to the model zoo: files, folders of runs, or names.
        host: address to listen on.
        port: by default the first free port from 7860.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.
        images: folders from which users can select images to label.
        data: path of a data set in any format of ``--data``. Its images have labels and are never
            selected.
        suspects: output folders of ``qbheat inspect --labels`` whose labels users can check.

    Raises:
        UserError: Gradio is not installed, a model does not exist, or the port is in use.
    """
    end_if_imported_by_child()
    models = Models(weights, device=device)
    temporary = tempfile.TemporaryDirectory(prefix="qbheat_app_")

    def end(number: int, frame: FrameType | None) -> None:
        temporary.cleanup()
        end_process(0)

    signal.signal(signal.SIGTERM, end)
    with temporary as folder:
        # Gradio reads these variables at import. It stores uploads in the folder, and sends no
        # usage statistics.
        os.environ["GRADIO_TEMP_DIR"] = folder
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        try:
            from .page import launch
        except ImportError as error:
            raise UserError(
                f"the page needs Gradio ({error}): pip install 'gradio>=6.31,<7'"
            ) from error
        pools = Pools(images, data, device)
        launch(models, pools, suspects, Path(folder), host=host, port=port)
