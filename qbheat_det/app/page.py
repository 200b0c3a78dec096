# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The Gradio page: its tabs, and a security policy that blocks content of other hosts."""

import contextlib
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
from fastapi import FastAPI

from qbheat_det.api import Detections
from qbheat_det.core.errors import UserError

from .connections import LimitedBodies, listen, run_server
from .label_review import LabelReview
from .review import Pools, Review
from .uploads import (
    IMAGE_SUFFIXES,
    LOWEST_SCORE,
    MAX_BYTES,
    MAX_FILES,
    Models,
    detect,
    draw_encoder,
    remove_old_files,
    render,
)

_TITLE = "qbheat_det"
_HEIGHT = "min(560px, 100vw)"  # of pictures; on narrow phones at most the width of the screen
_FIGURES = 3  # attention in two directions, and reconstructions
_LIFETIME = 3600  # seconds that uploads and results are kept
_INTERVAL = 60  # seconds between searches for old files
_UPLOAD_SECONDS = 300.0  # longest time to receive the body of a request
_PORTS = range(7860, 7960)  # the first free one is the default
_FONTS = ("system-ui", "sans-serif")
_CSS = (
    "footer {display: none !important} .gradio-container {max-width: 1280px !important} "
    # Without a border, the slider's thumb is white on white in the light theme.
    "input[type=range]::-webkit-slider-thumb {border: 2px solid var(--slider-color) !important}"
)
_NO_DETECTOR = "none (first round)"
# Keys click the buttons of the review that is visible, unless a field has the focus.
_KEYS = """() => document.addEventListener("keydown", (event) => {
  const name = {a: "accept", s: "skip", b: "back"}[event.key];
  if (!name || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  if (event.target.closest("input, textarea, [contenteditable]")) return;
  for (const id of [name, `${name}-label`]) {
    const button = document.getElementById(id);
    if (button && button.offsetParent && !button.disabled) button.click();
  }
})"""
# Without this policy, Gradio's page would load fonts and scripts from other hosts.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'"
)


class _Headers:
    """Middleware that adds the security policy to every response."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", _POLICY.encode())
                sniff = (b"x-content-type-options", b"nosniff")
                message["headers"] = [*message["headers"], policy, sniff]
            await send(message)

        await self._app(scope, receive, send_with_policy)


def launch(
    models: Models,
    pools: Pools,
    suspects: Sequence[str],
    folder: Path,
    *,
    host: str,
    port: int | None,
) -> None:
    """Serves the page until the process is interrupted. Arguments as in ``build_page``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Gradio's dependencies
        page = build_page(models, pools, suspects, folder)
        app = gr.mount_gradio_app(
            FastAPI(openapi_url=None),
            page,
            path="/",
            show_error=False,
            max_file_size=MAX_BYTES,
            theme=gr.themes.Default(font=_FONTS, font_mono=("monospace",)),
            css=_CSS,
            js=_KEYS,
            footer_links=[],
            ssr_mode=False,
        )
    app.add_middleware(_Headers)
    app.add_middleware(LimitedBodies, seconds=_UPLOAD_SECONDS)
    with _listen(host, port) as listener:
        # Gradio's ``delete_cache`` removes uploads, but not our results.
        threading.Thread(target=_clean, args=(folder,), daemon=True).start()
        bracketed = f"[{host}]" if ":" in host else host  # IPv6 has colons
        number = listener.getsockname()[1]
        print(f"The page is at http://{bracketed}:{number}/ until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            run_server(app, listener)


def _listen(host: str, port: int | None) -> socket.socket:
    """Returns a listening socket, by default on the first free port."""
    if port is not None:
        return listen(host, port)
    for number in _PORTS:
        with contextlib.suppress(UserError):
            return listen(host, number)
    return listen(host, _PORTS[0])


def _clean(folder: Path) -> None:
    """Removes old files again and again."""
    while True:
        time.sleep(_INTERVAL)
        remove_old_files(folder, _LIFETIME)


def build_page(models: Models, pools: Pools, suspects: Sequence[str], folder: Path) -> gr.Blocks:
    """Returns the page. It runs one job after the other, and queues up to sixteen jobs.

    ``suspects`` are output folders of ``qbheat inspect --labels`` whose labels users can check.
    ``folder`` is for temporary files.
    """
    with gr.Blocks(title=_TITLE, analytics_enabled=False) as page:
        gr.Markdown("# qbheat_det\nBoxes on your images, and what the encoder sees in them.")
        with gr.Tab("Detect"):
            build_detection(models, folder)
        with gr.Tab("What the encoder sees"):
            build_encoder(models, folder)
        if pools.folders:
            with gr.Tab("Select images to label"):
                build_review(models, pools, folder)
        if suspects:
            with gr.Tab("Check labels"):
                build_label_review(suspects, folder)
    page.queue(max_size=16, default_concurrency_limit=1)
    return page


class _DetectionWidgets(NamedTuple):
    """What a user enters to find objects, and where the results are shown."""

    files: gr.File
    model: gr.Dropdown
    threshold: gr.Slider
    classes: gr.Dropdown
    button: gr.Button
    status: gr.Markdown
    gallery: gr.Gallery
    table: gr.Dataframe
    download: gr.DownloadButton


def _lay_out_detection(labels: Sequence[str]) -> _DetectionWidgets:
    """Places the widgets: the inputs in the left column, and the results in the right one."""
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            files = gr.File(
                label=f"Images, at most {MAX_FILES}",
                file_count="multiple",
                file_types=list(IMAGE_SUFFIXES),
                height=180,
            )
            model = gr.Dropdown(labels, value=labels[0], label="Model")
            threshold = gr.Slider(LOWEST_SCORE, 1, 0.3, step=0.05, label="Score threshold")
            classes = gr.Dropdown([], multiselect=True, label="Classes", info="Empty for all")
            button = gr.Button("Find objects", variant="primary")
            gr.Markdown(
                f"At most {MAX_BYTES // 2**20} MB a file. Files stay on the machine that serves "
                "this page and are removed after an hour."
            )
        with gr.Column(scale=2, min_width=300):
            status = gr.Markdown(elem_id="status")
            gallery = gr.Gallery(
                label="Pictures", object_fit="contain", height=_HEIGHT, buttons=["fullscreen"]
            )
            table = gr.Dataframe(
                headers=["file", "class", "score", "x1", "y1", "x2", "y2"],
                label="Boxes, in pixels",
                interactive=False,
                max_height=320,
            )
            download = gr.DownloadButton(
                "Download boxes.json (COCO) and pictures", interactive=False
            )
    return _DetectionWidgets(
        files, model, threshold, classes, button, status, gallery, table, download
    )


def build_detection(models: Models, folder: Path) -> None:
    """Adds the widgets that find objects in uploads.

    ``predict`` runs the model and keeps all boxes. ``show`` draws those that the slider and the
    list of classes select, without predicting again.
    """
    results = gr.State([], time_to_live=_LIFETIME)
    widgets = _lay_out_detection(models.list_detectors())
    outputs = [widgets.gallery, widgets.table, widgets.download]

    def show(predicted: list[Detections], min_score: float, names: list[str]) -> tuple[Any, ...]:
        """Returns the new values of ``outputs``."""
        drawn, rows, archive = render(
            predicted, make_folder(folder), threshold=min_score, classes=names
        )
        # In a grid, Gradio would crop a single picture, so the first one is selected.
        pictures = gr.Gallery(drawn, selected_index=0 if drawn else None)
        return pictures, rows, gr.DownloadButton(value=archive, interactive=bool(predicted))

    def predict(
        paths: list[str] | None, label: str, min_score: float, names: list[str]
    ) -> tuple[Any, ...]:
        """Returns the new values of ``results``, ``status``, ``classes`` and ``outputs``."""
        if not paths:
            raise UserError("choose images first")
        detector = models.open_detector(label)
        predicted, skipped = detect(detector, [Path(path) for path in paths])
        # The user may have selected classes of another detector before.
        names = [name for name in names if name in detector.class_names]
        text = [f"{len(predicted)} of {len(paths)} files predicted by {label}.", *skipped]
        return (
            predicted,
            "\n\n".join(text),
            gr.Dropdown(detector.class_names, value=names),
            *show(predicted, min_score, names),
        )

    widgets.button.click(
        with_messages(predict),
        [widgets.files, widgets.model, widgets.threshold, widgets.classes],
        [results, widgets.status, widgets.classes, *outputs],
        api_visibility="private",
    )
    for event in (widgets.threshold.change, widgets.classes.input):
        event(
            with_messages(show),
            [results, widgets.threshold, widgets.classes],
            outputs,
            trigger_mode="always_last",
            api_visibility="private",
        )


def build_encoder(models: Models, folder: Path) -> None:
    """Adds the widgets that draw figures of an encoder."""
    # Pre-trained models come first, because only they can have reconstructions.
    labels = sorted(models.tasks, key=lambda label: models.tasks[label] != "pretraining")
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            file = gr.File(label="Image", file_types=list(IMAGE_SUFFIXES), height=180)
            model = gr.Dropdown(labels, value=labels[0], label="Model")
            button = gr.Button("Show", variant="primary")
        with gr.Column(scale=2, min_width=300):
            figures = []  # caption, image, caption, image, …
            for _ in range(_FIGURES):
                figures += [
                    gr.Markdown(),
                    gr.Image(visible=False, show_label=False, buttons=["fullscreen"]),
                ]

    def show(path: str | None, label: str) -> tuple[Any, ...]:
        """Returns the new values of ``figures``. Widgets without a figure become empty."""
        if not path:
            raise UserError("choose an image first")
        drawn = draw_encoder(models.open_run(label), Path(path), make_folder(folder))
        shown = []
        for image, caption in drawn:
            shown += [caption, gr.Image(image, visible=True)]
        empty = ["", gr.Image(visible=False)] * (_FIGURES - len(drawn))
        return *shown, *empty

    button.click(with_messages(show), [file, model], figures, api_visibility="private")


def build_review(models: Models, pools: Pools, folder: Path) -> None:
    """Adds the widgets that select images, and accept or skip each of them."""
    state = gr.State(None, time_to_live=_LIFETIME)
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            source = gr.Dropdown([*pools.folders], label="Images")
            budget = gr.Number(50, label="Number of images", precision=0, minimum=1)
            detectors = [_NO_DETECTOR, *models.list_detectors()]
            model = gr.Dropdown(detectors, label="Detector", info="Finds images with objects")
            start = gr.Button("Select", variant="primary")
            finish = gr.Button("Write list and tasks of the accepted images")
            download = gr.DownloadButton("Download selection.zip", interactive=False)
        with gr.Column(scale=2, min_width=300):
            status = gr.Markdown(elem_id="review")
            picture = gr.Image(show_label=False, height=_HEIGHT, buttons=[], interactive=False)
            with gr.Row():
                accept = gr.Button("Accept (A)", elem_id="accept", variant="primary")
                skip = gr.Button("Skip (S)", elem_id="skip")
                back = gr.Button("Back (B)", elem_id="back")

    def select(name: str, number: int, label: str) -> tuple[Any, ...]:
        weights = None
        if label != _NO_DETECTOR:
            weights = models.weights[label]
        return show(pools.select(name, number, weights))

    def show(review: Review) -> tuple[Any, ...]:
        return review, review.describe(), review.draw(), gr.DownloadButton(interactive=False)

    def write(review: Review | None) -> Any:
        if not review:
            raise UserError("select images first")
        return gr.DownloadButton(value=review.write(folder), interactive=True)

    outputs = [state, status, picture, download]  # ``show`` returns their new values
    start.click(with_messages(select), [source, budget, model], outputs, api_visibility="private")
    for button, step in ((accept, Review.accept), (skip, Review.skip), (back, Review.back)):
        # The default binds the step of this button. A closure would use that of the last button.
        def proceed(review: Review | None, step: Callable[[Review], Review] = step) -> Any:
            if not review:
                raise UserError("select images first")
            return show(step(review))

        button.click(with_messages(proceed), state, outputs, api_visibility="private")
    finish.click(with_messages(write), state, download, api_visibility="private")


def build_label_review(suspects: Sequence[str], folder: Path) -> None:
    """Adds the widgets that show suspicious labels, and accept or skip each correction."""
    state = gr.State(None, time_to_live=_LIFETIME)
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            source = gr.Dropdown([*suspects], label="Folder of qbheat inspect --labels")
            start = gr.Button("Open", variant="primary")
            finish = gr.Button("Write the accepted corrections")
            download = gr.DownloadButton("Download corrections.json", interactive=False)
            gr.Markdown("Then run `qbheat inspect --apply corrections.json`. Your data stay as is.")
        with gr.Column(scale=2, min_width=300):
            status = gr.Markdown(elem_id="label-review")
            picture = gr.Image(show_label=False, height=_HEIGHT, buttons=[], interactive=False)
            with gr.Row():
                accept = gr.Button("Accept (A)", elem_id="accept-label", variant="primary")
                skip = gr.Button("Skip (S)", elem_id="skip-label")
                back = gr.Button("Back (B)", elem_id="back-label")

    def open_folder(name: str) -> tuple[Any, ...]:
        return show(LabelReview.open(name, suspects))

    def show(review: LabelReview) -> tuple[Any, ...]:
        return review, review.describe(), review.draw(), gr.DownloadButton(interactive=False)

    def write(review: LabelReview | None) -> Any:
        if not review:
            raise UserError("open a folder first")
        return gr.DownloadButton(value=review.write(folder), interactive=True)

    outputs = [state, status, picture, download]  # ``show`` returns their new values
    start.click(with_messages(open_folder), source, outputs, api_visibility="private")
    steps = ((accept, LabelReview.accept), (skip, LabelReview.skip), (back, LabelReview.back))
    for button, step in steps:
        # The default binds the step of this button. A closure would use that of the last button.
        def proceed(
            review: LabelReview | None, step: Callable[[LabelReview], LabelReview] = step
        ) -> Any:
            if not review:
                raise UserError("open a folder first")
            return show(step(review))

        button.click(with_messages(proceed), state, outputs, api_visibility="private")
    finish.click(with_messages(write), state, download, api_visibility="private")


def make_folder(parent: Path) -> Path:
    """Creates a folder for the files of one event."""
    return Path(tempfile.mkdtemp(dir=parent))


def with_messages(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that the page shows the message of its ``UserError``.

    Other errors are only logged.
    """

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from error

    return call
