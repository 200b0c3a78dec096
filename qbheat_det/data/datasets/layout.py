# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the names of folders and files say: parts of a data set, and which image a label file has.

A *part* is "train", "val", "test", or "all" if no name tells. The *base* of a label file is the
folder of its data set: the folder above ``annotations``, ``labels``, ``train`` and the like.
"""

import functools
import os
import re
import urllib.parse
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .file_tree import FileTree, fold, is_below, stem_of
from .image_suffixes import suffix_of

_PARTS = {
    "train": ("train", "training", "trainset", "trainval"),
    "val": ("val", "valid", "validate", "validation", "valset", "eval", "evaluation", "dev"),
    "test": ("test", "testing", "tests", "testset"),
}
_PART_OF_WORD = {word: part for part, words in _PARTS.items() for word in words}
_LABEL_WORDS = frozenset(
    {
        *("labels", "label", "labeltxt", "annotations", "annotation", "annots", "annot", "anns"),
        *("ann", "annos", "anno", "bbox", "bboxes", "boxes", "gt", "groundtruth", "txt", "txts"),
        *("xml", "xmls", "json", "jsons", "images", "image", "img", "imgs", "jpegimages"),
    }
)
"""Words of folders that hold the labels or the images of a data set."""
PLAIN_WORDS = _LABEL_WORDS | {
    *("jpeg", "jpegs", "jpg", "jpgs", "png", "pngs", "photos", "photo", "pictures", "frames"),
    *("labeled", "labelled", "labelimg", "yolo", "voc", "coco", "obj", "data", "default", "ds"),
    "files",
}
"""Words of folders that say nothing about their content, except that it is images or labels."""
_WORDS_OF_SETS = frozenset({"set", "split", "dataset", "part", "fold", "subset", "list"})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+")
_YEAR = re.compile(r"(19|20)\d\d")
# How well a folder of images fits to a folder of labels. "images" and "labels" at one place in the
# path fit better than one folder, as in YOLO.
_IMAGES_AND_LABELS = 4
_SAME_FOLDER = 3
_SAME_NAMES = 2  # without plain words
_NAMES_OF_ONE = 1  # only one of the folders has names that are no plain words
_NO_FIT = 0
# The order in which one of several images of one name is chosen.
_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff")
_SUFFIX_ORDER = {suffix: order for order, suffix in enumerate(_SUFFIXES)}

Folders = tuple[str, ...]


@functools.lru_cache(maxsize=100_000)
def split_words(name: str) -> tuple[str, ...]:
    """Returns the words in a name in lower case, as in ("instances", "train", "2017")."""
    return tuple(word.lower() for word in _WORD.findall(name))


@functools.lru_cache(maxsize=100_000)
def part_of_name(name: str) -> str | None:
    """Returns the part that a file or folder name has as a word, or None."""
    parts = {_PART_OF_WORD[word] for word in split_words(name) if word in _PART_OF_WORD}
    if len(parts) != 1:
        return None
    return parts.pop()


def part_of(path: str, *, by_folder: bool = False) -> str | None:
    """Returns the part that the names in a relative path tell, or None.

    The last name that has a part decides. With ``by_folder``, the name of the file does not count,
    since "train" may be what an image shows.
    """
    return _find_part(path, by_folder=by_folder)[0]


def _find_part(path: str, *, by_folder: bool) -> tuple[str | None, str]:
    """Returns the part that the names in a relative path tell, and the name that tells it."""
    *names, file_name = path.split(os.sep)
    if not by_folder:
        names.append(os.path.splitext(file_name)[0])
    for name in reversed(names):
        part = part_of_name(name)
        if part:
            return part, name
    return None, ""


def holds_labels(name: str) -> bool:
    """Returns whether a folder of this name holds the labels or images of the folder above it."""
    return any(word in _LABEL_WORDS for word in split_words(name)) or bool(part_of_name(name))


def base_of(folders: Folders) -> Folders:
    """Returns the folder of the data set whose label files are in a folder."""
    for index, name in enumerate(folders):
        if holds_labels(name):
            return folders[:index]
    return folders


def folders_of(tree: FileTree, path: str) -> Folders:
    """Returns the names of the folders between a tree's root and a file."""
    *folders, _ = tree.relative(path).split(os.sep)
    return tuple(folders)


def sort_into_parts(
    tree: FileTree, files: Iterable[str], base: Folders, *, by_folder: bool = False
) -> dict[str, list[str]]:
    """Maps parts to files, see ``part_of``. Files whose names tell no part belong to "all".

    If only one part is told, by names such as "train_station" that go on after the word, all files
    belong to "all".
    """
    parts: dict[str, list[str]] = defaultdict(list)
    names: set[str] = set()
    for path in files:
        below = os.sep.join(tree.relative(path).split(os.sep)[len(base) :])
        part, name = _find_part(below, by_folder=by_folder)
        parts[part or "all"].append(path)
        names.add(name)
    if len(parts) == 2 and "all" in parts and all(map(_goes_on, names - {""})):
        return {"all": [path for paths in parts.values() for path in paths]}
    return dict(parts)


def _goes_on(name: str) -> bool:
    """Returns whether a name has another word after that of a part, as in "train_station"."""
    words = split_words(name)
    last = max(index for index, word in enumerate(words) if word in _PART_OF_WORD)
    for word in words[last + 1 :]:
        says_nothing = word in PLAIN_WORDS or word in _WORDS_OF_SETS
        if len(word) > 1 and not word.isdecimal() and not says_nothing:
            return True
    return False


def find_lists_of_parts(tree: FileTree, folder: str) -> dict[str, str]:
    """Maps parts to text files in a folder that are named like them, such as "train.txt".

    A file "trainval.txt" has the part "all". Of two files of a part, the first is used.
    """
    lists: dict[str, str] = {}
    for path in tree.others:
        if os.path.dirname(path) != folder or not path.lower().endswith(".txt"):
            continue
        words = [word for word in split_words(stem_of(path)) if not _YEAR.fullmatch(word)]
        if words == ["trainval"]:
            lists.setdefault("all", path)
        elif len(words) == 1 and words[0] in _PART_OF_WORD:
            lists.setdefault(_PART_OF_WORD[words[0]], path)
    return lists


def group_by_base(tree: FileTree, files: Iterable[str]) -> dict[Folders, list[str]]:
    """Maps the folders of data sets to their label files."""
    groups: dict[Folders, list[str]] = defaultdict(list)
    for path in files:
        groups[base_of(folders_of(tree, path))].append(path)
    return dict(groups)


def group_per_image_files(tree: FileTree, files: Iterable[str]) -> dict[Folders, list[str]]:
    """Maps the folders of data sets to their label files, of which each has one image.

    Folders that only sort the images, such as one per camera, belong to one data set. The label
    files are directly in them.
    """
    groups = group_by_base(tree, files)
    sorting = {base for base, paths in groups.items() if folders_of(tree, paths[0]) == base}
    if len(sorting) < 2:
        return groups
    common = min(sorting, key=len)
    while any(base[: len(common)] != common for base in sorting):
        common = common[:-1]
    merged = {base: paths for base, paths in groups.items() if base not in sorting}
    merged.setdefault(common, [])
    for base, paths in groups.items():
        if base in sorting:
            merged[common] += paths
    return merged


@dataclass
class Pairs:
    """Images and the label files that have their names.

    Attributes:
        image_of: maps label files to images.
        orphans: maps label files without an image to the reason.
        spares: maps label files of images for which others fit better to the reason.
        doubles: maps images to an image with the same name, which has their label file.
    """

    image_of: dict[str, str] = field(default_factory=dict)
    orphans: dict[str, str] = field(default_factory=dict)
    spares: dict[str, str] = field(default_factory=dict)
    doubles: dict[str, str] = field(default_factory=dict)


def pair(tree: FileTree, label_files: Sequence[str], named: Mapping[str, str] = {}) -> Pairs:
    """Finds the image of each label file by its name.

    The image is in the same folder, or in a folder whose name differs only in words such as
    "labels" and "images". If several images differ in their suffix, the one that the label file
    names is chosen, or else the first in the order of ``_SUFFIX_ORDER``.

    Args:
        tree: the files of the data set.
        label_files: files with the labels of one image each.
        named: maps label files to the file names of images in them.
    """
    pairs = Pairs()
    neighbours = _Neighbours(tree)
    candidates = {file: neighbours.find(file) for file in label_files}
    # Folders such as "labels_old" and "predict/labels" have labels of the same images.
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
    """Finds images with the name of a label file in the folders that fit to its folder."""

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree
        self._images: dict[tuple[str, str], list[str]] = defaultdict(list)
        for path in tree.all_images:
            self._images[os.path.dirname(path), stem_of(path)].append(path)
        self._folders = list(dict.fromkeys(folder for folder, _ in self._images))
        self._ranked: dict[str, list[tuple[int, list[str]]]] = {}

    def find(self, label_file: str) -> tuple[int, list[str]]:
        """Returns how well the best folder fits, and the images there; (0, []) for none."""
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
        return _NO_FIT, []

    def _rank(self, folder: str) -> list[tuple[int, list[str]]]:
        """Returns (closeness, folders of images) that fit to a folder of labels, best first."""
        if folder not in self._ranked:
            groups: dict[int, list[str]] = defaultdict(list)
            for image_folder in self._folders:
                groups[_measure_closeness(folder, image_folder)].append(image_folder)
            groups.pop(_NO_FIT, None)
            self._ranked[folder] = sorted(groups.items(), reverse=True)
        return self._ranked[folder]


def find_images_of_stem(tree: FileTree, stem: str) -> list[str]:
    """Returns the images that are named like a label file without its suffix."""
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
    """Assigns one of several images of one folder to a label file.

    ``owners`` maps the images that have label files to these, and ``named`` is the name of the
    image in the label file. If the image has another label file already, there is none for this.
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
    """Returns whether an image is in one of some folders, and can belong to a label file."""
    folder = os.path.dirname(image)
    return folder in folders and _measure_closeness(os.path.dirname(label_file), folder) > _NO_FIT


def _measure_closeness(label_folder: str, image_folder: str) -> int:
    """Returns how well a folder of images fits to a folder of labels."""
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
        return _NO_FIT
    return _NAMES_OF_ONE


def split_at_last(path: str, name: str) -> tuple[str, str, str]:
    """Returns the path above the last folder of a name, this name, and the path below it.

    Returns ``("", "", path)`` if no folder has the name.
    """
    names = path.split(os.sep)
    if name not in names:
        return "", "", path
    last = len(names) - 1 - names[::-1].index(name)
    above = os.sep.join(names[:last]) or os.sep
    return above, name, os.sep.join(names[last + 1 :])


def _list_names(folder: str, other: str) -> list[tuple[str, ...]]:
    """Returns the names in a path below the common folder of both, without plain words."""
    common = os.path.commonpath([folder, other])
    names = folder[len(common) :].strip(os.sep).split(os.sep)
    simplified = [_simplify(split_words(name)) for name in names]
    return [words for words in simplified if words]


def _simplify(words: tuple[str, ...]) -> tuple[str, ...]:
    """Removes plain words from a name, and a year beside others, as in "train2017"."""
    known = [_PART_OF_WORD.get(word, word) for word in words if word not in PLAIN_WORDS]
    if len(words) > 1:
        known = [word for word in known if not _YEAR.fullmatch(word)]
    return tuple(known)


def _pair_folders(
    tree: FileTree,
    label_files: Sequence[str],
    pairs: Pairs,
    owners: dict[str, str],
    named: Mapping[str, str],
) -> None:
    """Pairs folders of arbitrary names, if only one folder has images with the names of labels."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for path in label_files:
        by_folder[os.path.dirname(path)].append(path)
    used = {os.path.dirname(path) for path in pairs.image_of.values()}
    with_labels = {os.path.dirname(path) for path in pairs.image_of}
    for folder, files in by_folder.items():
        images_of = {file: find_images_of_stem(tree, stem_of(file)) for file in files}
        image_folders = {os.path.dirname(path) for paths in images_of.values() for path in paths}
        possible = [
            image_folder
            for image_folder in image_folders
            if image_folder not in used and not _has_telling_name(folder, image_folder)
        ]
        chosen = None
        if len(possible) == 1 and folder not in with_labels:
            (chosen,) = possible
        for file in files:
            images = [path for path in images_of[file] if os.path.dirname(path) == chosen]
            if images:
                _assign(pairs, owners, file, images, named.get(file, ""))
            else:
                pairs.orphans[file] = "there is no image of its name"


def _has_telling_name(folder: str, other: str) -> bool:
    """Returns whether a name below the common folder has a plain word or a part."""
    common = os.path.commonpath([folder, other])
    names = (folder[len(common) :] + os.sep + other[len(common) :]).split(os.sep)
    words = {word for name in names for word in split_words(name)}
    return bool(words & PLAIN_WORDS) or any(map(part_of_name, names))


def locate(tree: FileTree, name: str, label_file: str, part: str = "all") -> str | list[str]:
    """Finds the image that a label file names. Returns its path, or a list of none or several.

    A path in the name is looked up below the folder of the label file and below the root. If it
    does not exist there, all images of the same file name are compared by the ending of their path,
    by their part and by their distance from the label file.
    """
    name = name.replace("\\", "/").strip()
    file_name = name.rpartition("/")[2]
    images = tree.find_images(file_name) if file_name else []
    is_relative = not name.startswith(("/", "../"))
    if len(images) == 1:
        (image,) = images
        if _names_sibling_folder(tree, image, name):
            return []
        if is_relative:
            named_part = part_of(name, by_folder=True)
            part_of_image = _part_of_image(tree, image)
            if named_part and part_of_image and named_part != part_of_image:
                return []
            return image
    folder = os.path.dirname(label_file)
    for base in (folder, tree.root):
        path = os.path.normpath(os.path.join(base, name.lstrip("/")))
        if path not in tree.image_set:
            continue
        if not (is_below(path, folder) or is_below(path, tree.root)):
            continue
        if "/" in name or part == "all" or _part_of_image(tree, path) in (None, part):
            return path
    outside = os.path.normpath(os.path.join(folder, name))
    if not is_relative and os.path.isfile(outside):
        return outside
    if len(images) > 1:
        images = _choose_best(tree, images, name, folder, part)
    if len(images) == 1:
        return images[0]
    return list(images)


def _names_sibling_folder(tree: FileTree, image: str, name: str) -> bool:
    """Returns whether a name tells another folder of images, beside the folder of an image."""
    *folders, _ = name.split("/")
    if not folders or image.endswith(os.sep + name.replace("/", os.sep)):
        return False
    folder = os.path.dirname(image)
    sibling = os.path.join(os.path.dirname(folder), folders[-1])
    return sibling != folder and sibling in tree.image_folders


def _part_of_image(tree: FileTree, path: str) -> str | None:
    return part_of(tree.relative(path), by_folder=True)


def _choose_best(tree: FileTree, images: list[str], name: str, folder: str, part: str) -> list[str]:
    """Returns those of several images of one file name that fit best, at least one.

    Args:
        tree: the files of the data set.
        images: paths of the images.
        name: the image's name in the label file, perhaps with folders.
        folder: folder of the label file.
        part: part of the label file.
    """
    if tree.preferred:
        images = [path for path in images if is_below(path, tree.preferred)] or images
    for start in range(name.count("/") + 1):
        ending = "/" + "/".join(name.lstrip("/").split("/")[start:])
        same_ending = [path for path in images if path.replace(os.sep, "/").endswith(ending)]
        if same_ending:
            images = same_ending
            break
    if len(images) > 1 and part != "all":
        images = [path for path in images if _part_of_image(tree, path) == part] or images
    if len(images) > 1:
        distances = [_measure_distance(folder, os.path.dirname(path)) for path in images]
        nearest = min(distances)
        images = [
            path for path, distance in zip(images, distances, strict=True) if distance == nearest
        ]
    return images


@functools.lru_cache(maxsize=10_000)
def _measure_distance(first: str, second: str) -> int:
    """Returns the number of steps between two folders in the tree of folders."""
    common = os.path.commonpath([first, second]).rstrip(os.sep)
    distance = 0
    for path in (first, second):
        names = path[len(common) :].strip(os.sep).split(os.sep)
        distance += len([name for name in names if name])
    return distance


def find_ending(path: str, folders: Sequence[str], *, min_names: int = 1) -> str | None:
    """Returns the file or folder that the longest ending of a path names below one of ``folders``.

    Paths of other machines and of Windows are taken. Endings have at least ``min_names`` names.
    Returns None if no ending exists.
    """
    names = [name for name in re.split(r"[\\/]+", path) if name not in ("", ".", "..")]
    if names and names[0].endswith(":"):
        del names[0]
    for start in range(len(names) - min_names + 1):
        for folder in folders:
            path = os.path.join(folder, *names[start:])
            if os.path.exists(path):
                return path
    return None
