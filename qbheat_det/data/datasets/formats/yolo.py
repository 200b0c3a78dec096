# Copyright (c) qbheat_det contributors. Apache-2.0.
"""YOLO's format: a text file per image, with one object per line.

A line has the class, center, width and height of an object, or its class and a polygon, which is
replaced by its bounding box. Coordinates are fractions of the image's sides. An image without a
label file has no objects.

The parts and the classes are in a manifest (``yolo_manifest.py``). Without one, the parts are
folders, and the classes are in ``classes.txt``, ``obj.names`` or ``_darknet.labels``.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import short
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.data.datasets.file_tree import FileTree, is_below, stem_of
from qbheat_det.data.datasets.label_kinds import LabelKind, lines_like
from qbheat_det.data.datasets.labelled_image import LabelledImage
from qbheat_det.data.datasets.layout import (
    find_lists_of_parts,
    folders_of,
    group_per_image_files,
    sort_into_parts,
)
from qbheat_det.data.datasets.pairing import (
    Pairs,
    find_images_of_stem,
    pair,
)
from qbheat_det.data.datasets.text_files import (
    UnreadableFileError,
    number_lines,
    read_lines,
    read_text,
)

from .base import Format, Labels, LabelSet, add_unpaired, find_foreign_labels, locate_image
from .yolo_manifest import (
    MANIFEST_SUFFIXES,
    find_root,
    is_manifest,
    read_manifest,
    read_manifests,
    read_names_file,
)

_MANIFEST = "yolo manifest"
_OBJECT = r"^\s*\d+(\.0*)?(\s+[-+0-9.eE]+|\s+nan){4,}\s*$"  # class and four numbers or more
_NAMES_FILES = (
    *("classes.txt", "obj.names", "_darknet.labels", "names.txt", "labels.txt", "class.txt"),
    "class_names.txt",
)
_NAMES_SUFFIXES = (".names", ".labels")
_MAX_COORDINATE = 2.0  # larger values cannot be fractions of a side


def find_yolo(tree: FileTree) -> list[LabelSet]:
    """Finds the data sets that manifests describe. If there are none, finds those without one.

    Folders that a manifest names outside of the tree are added to the tree.

    Raises:
        UserError: no manifest can be used, or two in one folder contradict each other.
    """
    manifests = read_manifests(tree.label_files.get(_MANIFEST, ()))
    label_files = [path for path in tree.label_files.get("yolo", ()) if not _has_names(path)]
    is_of_other_labels = not label_files and bool(tree.list_other_labels("yolo"))
    if manifests and not is_of_other_labels:
        for manifest in manifests:
            for place in manifest.places:
                if not tree.has(place):
                    tree.add(find_root(place))
        return [
            LabelSet(folders_of(tree, manifest.file), manifest.parts, [manifest.file])
            for manifest in manifests
        ]
    label_files = [path for path in label_files if find_images_of_stem(tree, stem_of(path))]
    return [
        LabelSet(base, sort_into_parts(tree, group, base, by_folder=True))
        for base, group in group_per_image_files(tree, label_files).items()
    ]


class _Lists(NamedTuple):
    """The files and classes of a YOLO data set.

    Attributes:
        label_files: files with the labels of one image each.
        names: class names.
        files: other files that were read: the manifest, and files that list classes or images.
        notes: what was assumed or replaced, one sentence each.
        has_keypoints: whether lines have the points of a pose after the box.
    """

    label_files: list[str]
    names: list[str]
    files: list[str]
    notes: list[str]
    has_keypoints: bool = False


def _open_manifest(tree: FileTree, file: str) -> _Lists:
    """Returns the label files and classes of a data set with a manifest."""
    manifest = read_manifest(file)
    lists = [path for path in manifest.places if os.path.isfile(path)]
    label_files = [
        path
        for path in tree.label_files.get("yolo", ())
        if not _has_names(path) and path not in lists
    ]
    files = [file, *lists]
    notes = list(manifest.notes)
    names_files = [path for path in tree.other_files if _has_names(path)]
    if file.endswith(".data"):
        files += [path for path in names_files if read_names_file(path) == manifest.names]
    for path in names_files:
        if read_names_file(path) != manifest.names:
            notes.append(f"the class names are those of '{file}', and not of '{path}'")
            break
    return _Lists(label_files, manifest.names, files, notes, manifest.has_keypoints)


def _open_folder(tree: FileTree, labels: LabelSet) -> _Lists:
    """Returns the label files and classes of a data set without a manifest."""
    names, files, notes = _find_names(tree, labels)
    base = os.path.join(tree.root, *labels.base)
    folders = {os.path.dirname(path) for path in tree.other_files}
    for folder in sorted(folders):
        if is_below(base, folder):
            for path in find_lists_of_parts(tree, folder).values():
                notes.append(f"'{path}' is not used: a data.yaml must name the lists of images")
    label_files = [path for files_of_part in labels.parts.values() for path in files_of_part]
    return _Lists(label_files, names, files, notes)


def read_yolo(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the label files of a part's images. Images without a label file have no objects."""
    if labels.manifests:
        lists = _open_manifest(tree, labels.manifests[0])
    else:
        lists = _open_folder(tree, labels)
    pairs = pair(tree, lists.label_files)
    label_file_of = {image: file for file, image in pairs.image_of.items()}
    result = Labels(images=[], files=lists.files, notes=lists.notes)
    result.categories = [{"id": number, "name": name} for number, name in enumerate(lists.names)]
    if labels.manifests:
        images = _list_images_of_manifest(tree, labels.parts[part], part, result)
    else:
        images = _list_images_of_folders(tree, labels, part)
        # Other images, such as pictures of a web page, are not background.
        folders = {os.path.dirname(path) for path in label_file_of}
        images = {path: "" for path in images if os.path.dirname(path) in folders}
    foreign = find_foreign_labels(tree, "yolo")
    num_background = 0
    for path, name in images.items():
        if path in pairs.doubles:
            continue
        label_file = label_file_of.get(path, "")
        image = LabelledImage(label_file or path, name, file=path, label_file=label_file)
        result.images.append(image)
        if label_file:
            read_label_file(image, lists.names, has_keypoints=lists.has_keypoints)
        elif path in foreign:
            image.leave_out("with labels in another format", f"its labels are in '{foreign[path]}'")
        else:
            num_background += 1
    if num_background:
        result.notes.append(
            f"{num_background:,} of {len(images):,} images have no label file: they are used as "
            "images without objects"
        )
    label_folders = {
        os.path.dirname(label_file_of[path]) for path in images if path in label_file_of
    }
    if images and not label_folders:
        first = next(iter(images))
        usual = os.path.splitext(first.replace("/images/", "/labels/"))[0] + ".txt"
        result.problem = f"no image of '{part}' has a label file, such as '{usual}'"
    add_unpaired(result, _select_pairs(pairs, images, label_folders))
    return result


def _select_pairs(pairs: Pairs, images: Collection[str], label_folders: Collection[str]) -> Pairs:
    """Returns what could not be paired in one part of a data set.

    Args:
        pairs: the label files and images of all parts.
        images: the images of the part.
        label_folders: the folders of the label files of the part.
    """

    def select(reasons: dict[str, str]) -> dict[str, str]:
        return {
            file: reason
            for file, reason in reasons.items()
            if os.path.dirname(file) in label_folders
        }

    doubles = {path: chosen for path, chosen in pairs.doubles.items() if path in images}
    return Pairs(orphans=select(pairs.orphans), spares=select(pairs.spares), doubles=doubles)


def _list_images_of_manifest(
    tree: FileTree, places: Sequence[str], part: str, result: Labels
) -> dict[str, str]:
    """Maps the images of a part to their names in the list that names them; "" if none does.

    An image that a list names, but that does not exist, is added to ``result.images``.

    Args:
        tree: the files of the data set.
        places: image folders, and text files that list images.
        part: the part of the data set.
        result: the labels of the part.

    Raises:
        UserError: a list cannot be read.
    """
    images: dict[str, str] = {}
    for place in places:
        if os.path.isdir(place):
            inside = [path for path in tree.all_images if is_below(path, place)]
            if not inside:  # a link to a folder that is searched already
                target = os.path.realpath(place)
                inside = [path for path in tree.all_images if is_below(path, target)]
            images.update(dict.fromkeys(inside, ""))
            continue
        try:
            lines = read_lines(place)
        except UnreadableFileError as error:
            raise UserError(f"'{place}': {error}") from error
        for number, name in lines:
            image = LabelledImage(f"{place}, line {number}", name)
            exact = os.path.normpath(os.path.join(os.path.dirname(place), name))
            if exact in tree.image_set:
                image.file = exact
            locate_image(tree, image, place, part)
            if image.file:
                images[image.file] = name
            else:
                result.images.append(image)
    return images


def _list_images_of_folders(tree: FileTree, labels: LabelSet, part: str) -> dict[str, str]:
    """Maps the images of a part of a data set without a manifest to "", as no list names them."""
    base = os.path.join(tree.root, *labels.base)
    images = [path for path in tree.all_images if is_below(path, base)]
    parts = sort_into_parts(tree, images, labels.base, by_folder=True)
    return dict.fromkeys(parts.get(part, ()), "")


def _has_names(path: str) -> bool:
    """Returns whether a file's name, such as "classes.txt", tells that it lists the classes."""
    return os.path.basename(path).lower() in _NAMES_FILES


def _find_names(tree: FileTree, labels: LabelSet) -> tuple[list[str], list[str], list[str]]:
    """Finds the class names of a data set without a manifest.

    Returns the names, the files that list them, and notes. Without such a file, the classes are
    named by their numbers.

    Raises:
        UserError: two files list different classes.
    """
    base = os.path.join(tree.root, *labels.base)
    names_of: dict[str, list[str]] = {}  # by file
    for path in tree.other_files:
        if not _has_names(path) and not path.lower().endswith(_NAMES_SUFFIXES):
            continue
        if not is_below(path, base) and not is_below(base, os.path.dirname(path)):
            continue
        names = read_names_file(path)
        if names:
            names_of[path] = names
    if not names_of:
        count = _count_classes(path for files in labels.parts.values() for path in files)
        note = f"'{base}': no classes.txt names the classes, so they are named 0 to {count - 1}"
        return [str(number) for number in range(count)], [], [note]
    first, *others = names_of
    for other in others:
        if names_of[other] != names_of[first]:
            raise UserError(
                f"'{first}' and '{other}' have different class names: keep one of them, or write a "
                "data.yaml"
            )
    return names_of[first], list(names_of), []


def _count_classes(label_files: Iterable[str]) -> int:
    """Returns the number of classes of label files: the largest class plus 1, and at least 1."""
    count = 1
    for file in label_files:
        try:
            lines = read_lines(file)
        except UnreadableFileError:
            continue
        for _, line in lines:
            word = line.split()[0]
            if word.isdecimal() and len(word) < 4:
                count = max(count, int(word) + 1)
    return count


def read_label_file(
    image: LabelledImage, names: Sequence[str], *, has_keypoints: bool = False
) -> None:
    """Adds the boxes in an image's label file to the image."""
    try:
        text = read_text(image.label_file).content
    except UnreadableFileError as error:
        file = image.label_file
        image.exclusion = LeftOut(
            kind="that cannot be read", where=file, reason=str(error), item="label file"
        )
        return
    for number, line in number_lines(text):
        with image.skip_invalid_box(f"{image.label_file}, line {number}") as location:
            _add_line(image, location, line, names, has_keypoints=has_keypoints)


def _add_line(
    image: LabelledImage, location: str, line: str, names: Sequence[str], *, has_keypoints: bool
) -> None:
    """Adds the object in a line of a label file to an image.

    Args:
        image: the image of the label file.
        location: location of the line, for messages.
        line: class number, and then center x, center y, width and height of a box, or x and y of
            each vertex of a polygon. All are fractions of the image's sides.
        names: class names.
        has_keypoints: whether the points of a pose follow the box.

    Raises:
        ValueError: the line is invalid.
    """
    try:
        class_number, *values = map(float, line.split())
    except ValueError:
        raise ValueError(
            f"must be numbers, class, x, y, width and height, but is {short(line)}"
        ) from None
    if class_number not in range(len(names)):
        raise ValueError(
            f"class {line.split()[0]} is none of the {len(names)} in names, which are numbered "
            "from 0"
        )
    # A box of four numbers may be followed by a confidence, by a confidence and the number of a
    # track, or by the points of a pose, which are (x, y, visibility).
    has_confidence = len(values) == 5
    has_track = len(values) == 6 and line.split()[-1].isdecimal()
    visibilities = values[6::3]
    is_box_with_points = (
        len(values) > 6
        and (len(values) - 4) % 3 == 0
        and all(visibility in (0, 1, 2) for visibility in visibilities)
    )
    if has_keypoints or has_confidence or has_track or is_box_with_points:
        values = values[:4]
    if len(values) < 4 or len(values) % 2:
        raise ValueError(
            "must be class, x, y, width and height, or class and a polygon, but has "
            f"{len(values) + 1} numbers"
        )
    if not all(abs(value) <= _MAX_COORDINATE for value in values):
        raise ValueError(
            f"must be fractions of the image's sides, from 0 to 1, but is {short(line)}"
        )
    if len(values) == 4:
        x, y, width, height = values
        if width < 0 or height < 0:
            raise ValueError(f"has a negative width or height: {short(line)}")
        values = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    points = zip(values[::2], values[1::2], strict=True)
    index = int(class_number)
    image.add_box(location, names[index], points, is_relative=True, class_index=index)


YOLO = Format(
    name="yolo",
    title="YOLO",
    kinds=(
        LabelKind(name="yolo", suffixes=(".txt",), matches=lines_like(_OBJECT), has_one_image=True),
        LabelKind(
            name=_MANIFEST,
            suffixes=MANIFEST_SUFFIXES,
            matches=is_manifest,
            names_others=True,
        ),
    ),
    find=find_yolo,
    read=read_yolo,
    data="a `data.yaml` of Ultralytics or an `obj.data` of Darknet, or a folder with one of them; "
    "or a folder of images with a `.txt` file for each image, beside it or in `labels/`",
    images="the folders or lists (`.txt`) that the file names, or beside the labels. Without a "
    "`data.yaml`, class names come from `classes.txt`, `obj.names` or `_darknet.labels`; without "
    "such a file they are numbers",
    lists_classes=True,
)
