# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens the data sets given by ``--data``.

``open_source`` recognizes the data set in a file or folder, and returns a ``DataSource``. It has a
``Source`` for each part of the data set. A ``Source`` tells how to read the part, and is saved in
``run.json``. ``read_annotations`` (``reading.py``) reads the boxes of a ``Source``.
"""

import os
from collections.abc import Sequence

from qbheat_det.core.errors import UserError, refuse_unreadable
from qbheat_det.core.object_stores import fetch

from .formats.yolo_manifest import find_data_folder
from .image_folder import account_for_folders, check_image_folder
from .layout import holds_labels
from .other_files import account_for_classes
from .reading import ReadParts, read_data_set, walk_files
from .recognition import Recognized, choose_parts, recognize
from .source import CLASSES, IMAGES, DataSource, Source
from .zip_files import unpack


def open_source(path: str, image_root: str = "", *, likely_root: str = "") -> DataSource:
    """Recognizes the data set in a file, a folder or a zip.

    Args:
        path: the file, folder or zip.
        image_root: folder of the images, if ``path`` is a label file or a folder of them; "" to
            look near the label files.
        likely_root: folder in which the images of a label file are looked up first; "" for none.

    Raises:
        UserError: the path has no data set, or several.
    """
    path = unpack(path)
    if not os.path.exists(path):
        raise UserError(f"'{path}' does not exist")
    absolute = os.path.abspath(path)
    image_root = fetch(image_root)
    likely_root = fetch(likely_root)
    root = ""
    data_set = None
    if not os.path.isdir(path):
        root, data_set = _find_image_root(absolute, image_root, likely_root)
    elif image_root:
        root = os.path.abspath(image_root)
    recognized = _recognize(absolute, root)
    if recognized.format is None:
        if root:
            raise UserError(f"'{path}' contains its images: leave out the images '{image_root}'")
        sources = [
            Source(CLASSES, absolute, part, folders=(folder,))
            for part, folder in recognized.folders.items()
        ]
        val = sources[1] if len(sources) > 1 else None
        account = account_for_classes(recognized, absolute)
        return DataSource(sources[0], val, account=account)
    name = recognized.format.name
    data_set = data_set or read_data_set(absolute, root, name, ())
    sources = [Source(name, absolute, part, root) for part in data_set.parts]
    val = sources[1] if len(sources) > 1 else None
    return DataSource(sources[0], val, data_set.parts, data_set.account)


def find_format(path: str) -> str:
    """Returns the format of a file, folder or zip: a key of ``FORMATS``, or ``CLASSES``.

    Recognizes the data set as ``open_source`` does, but does not read its annotations. Raises a
    ``UserError`` if the path has no data set, or several.
    """
    path = unpack(path)
    if not os.path.exists(path):
        raise UserError(f"'{path}' does not exist")
    recognized = _recognize(os.path.abspath(path), "")
    if recognized.format is None:
        return CLASSES
    return recognized.format.name


def open_images(paths: Sequence[str]) -> DataSource:
    """Returns the source of images without labels in folders.

    Raises a ``UserError`` if a folder has no images.
    """
    folders = tuple(os.path.abspath(fetch(folder)) for folder in paths)
    for folder in folders:
        check_image_folder(folder)
    source = Source(IMAGES, folders[0], folders=folders, labelled=False)
    return DataSource(source, account=account_for_folders(folders))


def _find_image_root(file: str, given: str, likely: str) -> tuple[str, ReadParts]:
    """Finds the folder of the images of a label file. Returns it and the data set that was read.

    The candidates are ``given`` alone, or else ``likely``, the folder that a ``data.yaml`` names,
    the folder of the label file, and its parent if the folder is named like a folder of labels. The
    first with an image is used. The folder that a ``data.yaml`` names must have all of the images.

    Args:
        file: path of the label file.
        given: folder that the user has given; "" for none.
        likely: folder to try first; "" for none.

    Raises:
        UserError: the label file cannot be read, or no candidate has an image.
    """
    folder = os.path.dirname(file)
    roots = [folder]
    if holds_labels(os.path.basename(folder)):
        roots.append(os.path.dirname(folder))
    named = find_data_folder(file)
    if named:
        roots.insert(0, named)
    if given:
        roots = [os.path.abspath(given)]
    elif likely:
        roots.insert(0, os.path.abspath(likely))
    errors: list[UserError] = []
    for root in roots:
        try:
            recognized = _recognize(file, root)
            name = recognized.format.name if recognized.format else ""
            data_set = read_data_set(file, root, name, ())
        except UserError as error:
            errors.append(error)
            continue
        if root == named and not given and not _is_complete(data_set, recognized):
            continue
        if any(part.images for part in data_set.parts.values()):
            return root, data_set
    if errors:
        raise errors[0]
    message = (
        f"the images of '{file}' were not found: set their folder with --images, or with "
        "--val-images for --val"
    )
    if data_set.account.faults:
        message += f" ({data_set.account.faults[0].message})"
    raise UserError(message)


def _is_complete(data_set: ReadParts, recognized: Recognized) -> bool:
    """Returns whether all images and parts that the labels name were found, with label files."""
    roles = choose_parts(recognized.labels.parts) if recognized.labels else {}
    has_problem = any(part.problem for part in data_set.parts.values())
    has_missing = any(one.item == "missing image" for one in data_set.account.left_out)
    return len(data_set.parts) == len(roles) and not has_problem and not has_missing


def _recognize(path: str, image_root: str) -> Recognized:
    with refuse_unreadable(path):
        return recognize(walk_files(path, image_root))
