# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The images of an annotation file in COCO's format, without what is said about them.

Every set here is one of pre-training: ``unlabelled`` in its metadata.
"""

import os
from collections.abc import Callable
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError

from .coco_file import CocoFile
from .faults import raise_first

PathLike = str | os.PathLike[str]


def register_coco_images(
    name: str,
    json_file: PathLike,
    image_root: PathLike,
    *,
    prepare: Callable[[], object] | None = None,
) -> None:
    """Registers the images of an annotation file; it is read when the set is first loaded.

    Registering a name again with the same files does nothing.

    Args:
        name: of the new data set.
        json_file: annotations, or a list of images alone.
        image_root: folder that its file names start from.
        prepare: makes the files where they do not exist yet.

    Raises:
        UserError: the name is taken by other data.
    """
    paths = os.path.abspath(json_file), os.path.abspath(image_root)
    if name in DatasetCatalog:
        known = MetadataCatalog.get(name)
        if (known.get("json_file"), known.get("image_root")) != paths or not known.unlabelled:
            raise UserError(
                f"the data set name '{name}' is already registered with "
                f"'{known.get('json_file')}'; choose another name for '{paths[0]}'"
            )
        return

    def load() -> list[dict[str, Any]]:
        if prepare is not None:
            prepare()
        return load_coco_images(*paths)

    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(
        json_file=paths[0],
        image_root=paths[1],
        unlabelled=True,
        evaluator_type="reconstruction",
    )
    if prepare is not None:  # so that no one misses the json_file before
        MetadataCatalog.get(name).set(drawn_on_first_use=True)


def load_coco_images(json_file: PathLike, image_root: PathLike) -> list[dict[str, Any]]:
    """Returns ``file_name`` and ``image_id`` of every image, in the order of the ids.

    Raises:
        UserError: the file is not COCO's, an image has no id of its own, or its file is not in
            the folder.
    """
    file = CocoFile(str(json_file))
    entries = file.read(needed=("images",))["images"]
    if not entries:
        file.fail("the list 'images' is empty")
    entries = file.with_files(file.with_ids(entries, "image"), str(image_root))
    raise_first(file.faults)
    return [
        {"file_name": os.path.join(image_root, entry["file_name"]), "image_id": entry["id"]}
        for entry in sorted(entries, key=lambda entry: entry["id"])
    ]
