# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The review of selected images in the page: a person accepts or skips each of them."""

import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import PIL.Image

from qbheat_det.core.errors import UserError
from qbheat_det.labelling import Selection, draw_image, select, write_selection


class Drawable(Protocol):
    """A review, whose current item has a text and a picture."""

    def describe(self) -> str: ...

    def draw(self) -> PIL.Image.Image | None: ...


def describe_and_draw(review: Drawable) -> tuple[str, PIL.Image.Image | None]:
    """Returns the text and the picture of the current item.

    If the picture cannot be drawn, the text says why. An error would block the review at this item.
    """
    text = review.describe()
    try:
        return text, review.draw()
    except (UserError, OSError) as error:
        return f"{text}\n\nThere is no picture: {error}", None


@dataclass(frozen=True)
class Pools:
    """The folders from which a user of the page can select images to label, and the labelled data.

    Attributes:
        folders: folders of images. Users cannot select from any other folder.
        data: path of a data set in any format of ``--data``, or None. Its images have labels and
            are never selected.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.
    """

    folders: Sequence[str] = ()
    data: str | None = None
    device: str | None = None

    def select(self, folder: str, budget: int, weights: str | None) -> "Review":
        """Selects images like ``qbheat select``, and returns a review of them.

        Args:
            folder: one of ``folders``.
            budget: number of images to select.
            weights: detector whose predictions decide which images are selected, or None.

        Raises:
            UserError: the folder is not offered, or ``select`` cannot select from it.
        """
        if folder not in self.folders:
            raise UserError(f"'{folder}' is not offered: start the app with --images {folder}")
        return Review(select(folder, budget, weights=weights, data=self.data, device=self.device))


@dataclass(frozen=True)
class Review:
    """The state of a review: a selection, and how many of its images are accepted.

    The first ``accepted`` of ``selection.files`` are accepted. The rest is not reviewed yet.
    """

    selection: Selection
    accepted: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all images of the selection are accepted."""
        return self.accepted >= len(self.selection.files)

    @property
    def current(self) -> str:
        """Path of the image to accept or skip next. Raises ``UserError`` if there is none."""
        if self.is_done:
            raise UserError("all images are accepted or skipped")
        return self.selection.files[self.accepted]

    def accept(self) -> "Review":
        """Accepts the current image. Raises ``UserError`` if there is none."""
        _ = self.current  # raises the error
        return replace(self, accepted=self.accepted + 1)

    def skip(self) -> "Review":
        """Removes the current image, and adds the strategy's next image at the end."""
        return replace(self, selection=self.selection.skip(self.current))

    def back(self) -> "Review":
        """Returns to the image that was accepted last."""
        return replace(self, accepted=max(0, self.accepted - 1))

    def describe(self) -> str:
        """Returns the progress and the name of the current image."""
        text = f"{self.accepted} of {len(self.selection.files)} accepted, "
        text += f"{len(self.selection.skipped)} skipped"
        if self.is_done:
            return f"{text}."
        return f"{text}: `{Path(self.current).name}`"

    def draw(self) -> PIL.Image.Image | None:
        """Draws the current image with the detector's boxes. Returns None if there is no image."""
        if self.is_done:
            return None
        return draw_image(self.selection, self.current, side=1024)

    def write(self, parent: Path) -> str:
        """Writes the files of ``qbheat select`` for the accepted images, and packs them in a zip.

        Returns the path of the zip, which is in a new folder in ``parent``. Raises ``UserError`` if
        no image is accepted.
        """
        if not self.accepted:
            raise UserError("accept an image first")
        folder = Path(tempfile.mkdtemp(dir=parent))
        accepted = replace(self.selection, files=self.selection.files[: self.accepted])
        archive = folder / "selection.zip"
        with zipfile.ZipFile(archive, "w") as stream:
            for path in write_selection(accepted, folder):
                stream.write(path, path.name)
        return str(archive)
