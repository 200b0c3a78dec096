# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds the image of each label file that has the labels of one image, by the names of both."""

import os
import urllib.parse
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .file_tree import FileTree, fold, stem_of
from .image_suffixes import suffix_of
from .layout import PLAIN_WORDS, part_of_name, simplify, split_words

# How well a folder of images matches a folder of labels; the best match is the largest number.
_IMAGES_AND_LABELS = 4  # the paths differ only in "images" and "labels", as in YOLO
_SAME_FOLDER = 3
_SAME_NAMES = 2  # the paths differ only in words such as "jpegs" and "annotations"
_ONE_HAS_NAMES = 1  # only one of the paths has other words, such as "camera1"
_NO_MATCH = 0  # both paths have other words, and these differ
# If several images differ only in their suffix, the first in this order is chosen.
_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff")
_SUFFIX_ORDER = {suffix: order for order, suffix in enumerate(_SUFFIXES)}


@dataclass
class Pairs:
    """The images of label files, and what could not be paired.

    Attributes:
        image_of: maps each label file to its image.
        orphans: maps each label file without an image to the reason.
        spares: maps each label file that is not used, because label files in another folder match
            its images better, to the reason.
        doubles: maps each image whose name differs from that of another image only in the suffix to
            this other image, which has the label file.
    """

    image_of: dict[str, str] = field(default_factory=dict)
    orphans: dict[str, str] = field(default_factory=dict)
    spares: dict[str, str] = field(default_factory=dict)
    doubles: dict[str, str] = field(default_factory=dict)


def pair(tree: FileTree, label_files: Sequence[str], named: Mapping[str, str] = {}) -> Pairs:
    """Finds the image of each label file, which has the same file name up to the suffix.

    The image is in the same folder, or in a folder whose path differs only in words such as
    "labels" and "images". If several images have the name, the label file may contain the full name
    of its image. Otherwise, a JPEG is preferred.

    Args:
        tree: the files of the data set.
        label_files: files with the labels of one image each.
        named: maps label files to the name of the image that they contain, if they contain one.
    """
    pairs = Pairs()
    neighbours = _Neighbours(tree)
    candidates = {file: neighbours.find(file) for file in label_files}
    # Label files in "labels_old" are not used if those in "labels" match the images better.
    best_closeness: dict[str, int] = defaultdict(int)
    for closeness, images in candidates.values():
        for path in images:
            folder = os.path.dirname(path)
            best_closeness[folder] = max(best_closeness[folder], closeness)
    owners: dict[str, str] = {}
    unpaired: list[str] = []
    for label_file, (closeness, images) in candidates.items():
        folders = {os.path.dirname(path) for path in images}
        if not images:
            unpaired.append(label_file)
        elif all(best_closeness[folder] > closeness for folder in folders):
            pairs.spares[label_file] = f"other labels fit better to the images in '{folders.pop()}'"
        elif len(folders) > 1:
            first, second, *_ = images
            reason = f"{len(images)} images have its name, such as '{first}' and '{second}'"
            pairs.orphans[label_file] = reason
        else:
            _assign(pairs, owners, label_file, images, named.get(label_file, ""))
    _pair_folders(tree, unpaired, pairs, owners, named)
    return pairs


class _Neighbours:
    """Finds the images that have the name of a label file, in the folders that match its folder."""

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree
        self._images: dict[tuple[str, str], list[str]] = defaultdict(list)
        for path in tree.all_images:
            self._images[os.path.dirname(path), stem_of(path)].append(path)
        self._folders = list(dict.fromkeys(folder for folder, _ in self._images))
        self._ranked: dict[str, list[tuple[int, list[str]]]] = {}

    def find(self, label_file: str) -> tuple[int, list[str]]:
        """Returns the images with the name of a label file in the folders that match best.

        Returns (closeness, paths). The closeness tells how well these folders match. Names that
        differ in case or percent signs are used if no exact name is found. Returns (_NO_MATCH, [])
        if there are no images.
        """
        stem = stem_of(label_file)
        ranked = self._rank(os.path.dirname(label_file))
        for closeness, folders in ranked:
            images: list[str] = []
            for folder in folders:
                images += self._images.get((folder, stem), ())
            if images:
                return closeness, images
        almost_equal = find_images_of_stem(self._tree, stem)
        for closeness, folders in ranked:
            images = [path for path in almost_equal if os.path.dirname(path) in folders]
            if images:
                return closeness, images
        return _NO_MATCH, []

    def _rank(self, folder: str) -> list[tuple[int, list[str]]]:
        """Returns (closeness, folders of images) for a folder of labels, the best match first.

        The result is stored, as all label files of a folder need it.
        """
        if folder not in self._ranked:
            groups: dict[int, list[str]] = defaultdict(list)
            for image_folder in self._folders:
                groups[_measure_closeness(folder, image_folder)].append(image_folder)
            groups.pop(_NO_MATCH, None)
            self._ranked[folder] = sorted(groups.items(), reverse=True)
        return self._ranked[folder]


def find_images_of_stem(tree: FileTree, stem: str) -> list[str]:
    """Returns the images whose name is ``stem``, with or without a suffix, up to the case.

    ``stem`` is the name of a label file without its suffix. If no image has it, percent signs in it
    are decoded, as in "a%20b".
    """
    for name in (stem, urllib.parse.unquote(stem)):
        images = []
        for path in tree.find_images(name):
            # Some tools name the label file of a.jpg "a.jpg.txt".
            if fold(name) in (fold(os.path.basename(path)), fold(stem_of(path))):
                images.append(path)
        if images:
            return images
    return []


def _assign(
    pairs: Pairs, owners: dict[str, str], label_file: str, images: Sequence[str], named: str
) -> None:
    """Adds a label file and one of several images of the same name and folder to ``pairs``.

    If the image has been paired with another label file, this one becomes an orphan.

    Args:
        pairs: the pairs, which are changed.
        owners: maps images to their label files, and is changed.
        label_file: path of the label file.
        images: paths of the images, which differ in their suffix.
        named: name of the image in the label file, or "".
    """

    def rank(path: str) -> tuple[bool, int, str]:
        order = _SUFFIX_ORDER.get(suffix_of(path), len(_SUFFIX_ORDER))
        return os.path.basename(path) != named, order, path

    chosen, *others = sorted(images, key=rank)
    if chosen in owners:
        pairs.orphans[label_file] = f"'{chosen}' has the labels of '{owners[chosen]}'"
        return
    owners[chosen] = label_file
    pairs.image_of[label_file] = chosen
    pairs.doubles.update(dict.fromkeys(others, chosen))


def fits_label_file(image: str, label_file: str, folders: Collection[str]) -> bool:
    """Returns whether an image is in one of ``folders``, and its folder matches a label file's."""
    folder = os.path.dirname(image)
    return folder in folders and _measure_closeness(os.path.dirname(label_file), folder) > _NO_MATCH


def _measure_closeness(label_folder: str, image_folder: str) -> int:
    """Returns how well a folder of images matches a folder of labels, from 0 (no match) to 4."""
    if image_folder == label_folder:
        return _SAME_FOLDER
    above, name, below = split_at_last(image_folder, "images")
    if name and os.path.join(above, "labels", below).rstrip(os.sep) == label_folder:
        return _IMAGES_AND_LABELS
    label_names = _list_names(label_folder, image_folder)
    image_names = _list_names(image_folder, label_folder)
    if label_names == image_names:
        return _SAME_NAMES
    if label_names and image_names:
        return _NO_MATCH
    return _ONE_HAS_NAMES


def split_at_last(path: str, name: str) -> tuple[str, str, str]:
    """Splits a path at its last folder ``name``, as ``str.rpartition`` does.

    Returns (path above the folder, name, path below it), or ("", "", path) without such a folder.
    """
    names = path.split(os.sep)
    if name not in names:
        return "", "", path
    last = len(names) - 1 - names[::-1].index(name)
    above = os.sep.join(names[:last]) or os.sep
    return above, name, os.sep.join(names[last + 1 :])


def _list_names(folder: str, other: str) -> list[tuple[str, ...]]:
    """Returns the words of each folder below the common folder of ``folder`` and ``other``.

    Plain words, and folders of only plain words, are left out.
    """
    common = os.path.commonpath([folder, other])
    names = folder[len(common) :].strip(os.sep).split(os.sep)
    simplified = [simplify(split_words(name)) for name in names]
    return [words for words in simplified if words]


def _pair_folders(
    tree: FileTree,
    label_files: Sequence[str],
    pairs: Pairs,
    owners: dict[str, str],
    named: Mapping[str, str],
) -> None:
    """Pairs label files with the images of the only folder that has images of their names.

    The names of this folder and the folder of the label files may be arbitrary, but must not have
    words such as "labels" or "train", because these would have to match. Label files without an
    image become orphans.

    Args:
        tree: the files of the data set.
        label_files: label files for which no folder of images matches.
        pairs: the pairs, which are changed.
        owners: maps images to their label files, and is changed.
        named: maps label files to the names of images in them.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for path in label_files:
        by_folder[os.path.dirname(path)].append(path)
    paired_image_folders = {os.path.dirname(path) for path in pairs.image_of.values()}
    paired_label_folders = {os.path.dirname(path) for path in pairs.image_of}
    for folder, files in by_folder.items():
        images_of = {file: find_images_of_stem(tree, stem_of(file)) for file in files}
        image_folders = {os.path.dirname(path) for paths in images_of.values() for path in paths}
        possible = []
        for image_folder in image_folders - paired_image_folders:
            if not _has_telling_name(folder, image_folder):
                possible.append(image_folder)
        chosen = None
        if len(possible) == 1 and folder not in paired_label_folders:
            (chosen,) = possible
        for file in files:
            images = [path for path in images_of[file] if os.path.dirname(path) == chosen]
            if images:
                _assign(pairs, owners, file, images, named.get(file, ""))
            else:
                pairs.orphans[file] = "there is no image of its name"


def _has_telling_name(folder: str, other: str) -> bool:
    """Returns whether a folder below the common folder is named like labels, images or a part."""
    common = os.path.commonpath([folder, other])
    names = (folder[len(common) :] + os.sep + other[len(common) :]).split(os.sep)
    words = {word for name in names for word in split_words(name)}
    return bool(words & PLAIN_WORDS) or any(map(part_of_name, names))
