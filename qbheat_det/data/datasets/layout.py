# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What names of files and folders tell: the part of a data set, and the image of a label file.

A *part* of a data set is "train", "val", "test", or "all" if no name tells. The *base* of a label
file is the folder of its data set: the folder above ``annotations``, ``labels``, ``train`` and the
like.
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
# How well a folder of images matches a folder of labels; the best match is the largest number.
_IMAGES_AND_LABELS = 4  # the paths differ only in "images" and "labels", as in YOLO
_SAME_FOLDER = 3
_SAME_NAMES = 2  # the paths differ only in words such as "jpegs" and "annotations"
_ONE_HAS_NAMES = 1  # only one of the paths has other words, such as "camera1"
_NO_MATCH = 0  # both paths have other words, and these differ
# If several images differ only in their suffix, the first in this order is chosen.
_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff")
_SUFFIX_ORDER = {suffix: order for order, suffix in enumerate(_SUFFIXES)}

MAX_PATH = 4096
"""Largest number of characters in a path. No system has longer ones."""
Folders = tuple[str, ...]
"""Names of nested folders, from the root of a tree of files on."""


@functools.lru_cache(maxsize=100_000)
def split_words(name: str) -> tuple[str, ...]:
    """Returns the words in a name in lower case, as in ("instances", "train", "2017")."""
    return tuple(word.lower() for word in _WORD.findall(name))


@functools.lru_cache(maxsize=100_000)
def part_of_name(name: str) -> str | None:
    """Returns the part that a word in a name tells, as "val" in "valid_2017"; None without one.

    A name with words of two parts, such as "train_val", tells none.
    """
    parts = {_PART_OF_WORD[word] for word in split_words(name) if word in _PART_OF_WORD}
    if len(parts) != 1:
        return None
    return parts.pop()


def part_of(path: str, *, by_folder: bool = False) -> str | None:
    """Returns the part that the last possible name in a relative path tells, or None.

    With ``by_folder``, the name of the file does not count, because an image of a train may be
    named "train.jpg".
    """
    return _find_part(path, by_folder=by_folder)[0]


def _find_part(path: str, *, by_folder: bool) -> tuple[str | None, str]:
    """Returns ``part_of`` a path, and the name that tells it; (None, "") if no name does."""
    *names, file_name = path.split(os.sep)
    if not by_folder:
        names.append(os.path.splitext(file_name)[0])
    for name in reversed(names):
        part = part_of_name(name)
        if part:
            return part, name
    return None, ""


def holds_labels(name: str) -> bool:
    """Returns whether a folder's name, such as "labels" or "train", says its parent is the base."""
    return any(word in _LABEL_WORDS for word in split_words(name)) or bool(part_of_name(name))


def base_of(folders: Folders) -> Folders:
    """Returns the base of label files in ``folders``: the folders above the first "labels", say."""
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
    """Groups files by the part that their paths below ``base`` tell, or "all" if they tell none.

    If only one part is told, and only by names such as "train_station", it is not meant as a part.
    All files then belong to "all".

    Args:
        tree: the files of the data set.
        files: paths of the files.
        base: folder of the data set. Its own name tells no part.
        by_folder: whether only names of folders tell a part.
    """
    parts: dict[str, list[str]] = defaultdict(list)
    names: set[str] = set()
    for path in files:
        below = os.sep.join(tree.relative(path).split(os.sep)[len(base) :])
        part, name = _find_part(below, by_folder=by_folder)
        parts[part or "all"].append(path)
        names.add(name)
    has_one_part = len(parts) == 2 and "all" in parts
    if has_one_part and all(map(_has_more_words, names - {""})):
        return {"all": [path for paths in parts.values() for path in paths]}
    return dict(parts)


def _has_more_words(name: str) -> bool:
    """Returns whether a word follows that of a part, as in "train_station" (not "train_set")."""
    words = split_words(name)
    last = max(index for index, word in enumerate(words) if word in _PART_OF_WORD)
    for word in words[last + 1 :]:
        says_nothing = word in PLAIN_WORDS or word in _WORDS_OF_SETS
        if len(word) > 1 and not word.isdecimal() and not says_nothing:
            return True
    return False


def find_lists_of_parts(tree: FileTree, folder: str) -> dict[str, str]:
    """Maps parts to the text files in a folder that are named like them, such as "train.txt".

    The part of a file "trainval.txt" is "all". If two files have the same part, the first is used.
    """
    lists: dict[str, str] = {}
    for path in tree.other_files:
        if os.path.dirname(path) != folder or not path.lower().endswith(".txt"):
            continue
        words = [word for word in split_words(stem_of(path)) if not _YEAR.fullmatch(word)]
        if words == ["trainval"]:
            lists.setdefault("all", path)
        elif len(words) == 1 and words[0] in _PART_OF_WORD:
            lists.setdefault(_PART_OF_WORD[words[0]], path)
    return lists


def group_by_base(tree: FileTree, files: Iterable[str]) -> dict[Folders, list[str]]:
    """Groups label files by their base, which is the folder of their data set."""
    groups: dict[Folders, list[str]] = defaultdict(list)
    for path in files:
        groups[base_of(folders_of(tree, path))].append(path)
    return dict(groups)


def group_per_image_files(tree: FileTree, files: Iterable[str]) -> dict[Folders, list[str]]:
    """Groups label files that have the labels of one image each by the folder of their data set.

    Folders of arbitrary names, such as one per camera, that have the label files directly in them
    are joined to one data set in their innermost common folder.
    """
    groups = group_by_base(tree, files)
    direct = {base for base, paths in groups.items() if folders_of(tree, paths[0]) == base}
    if len(direct) < 2:
        return groups
    common = min(direct, key=len)
    while any(base[: len(common)] != common for base in direct):
        common = common[:-1]
    joined = {base: paths for base, paths in groups.items() if base not in direct}
    joined.setdefault(common, [])
    for base, paths in groups.items():
        if base in direct:
            joined[common] += paths
    return joined


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
    simplified = [_simplify(split_words(name)) for name in names]
    return [words for words in simplified if words]


def _simplify(words: tuple[str, ...]) -> tuple[str, ...]:
    """Removes plain words from a name's words, and the year in a name such as "train2017"."""
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


def locate(tree: FileTree, name: str, label_file: str, part: str = "all") -> str | list[str]:
    """Finds the image that a label file names. Returns its path, or the list of possible images.

    The list is empty if there is no such image, and has several paths if the name is ambiguous.
    A name with folders is looked up in the folder of the label file and in the root. If it does not
    exist there, the images of the same file name are compared: by the end of their path, then by
    their part, and then by their distance from the label file.

    Args:
        tree: the files of the data set.
        name: file name or path of an image, perhaps of another machine.
        label_file: path of the label file.
        part: part of the label file.
    """
    name = name.replace("\\", "/").strip()
    file_name = name.rpartition("/")[2]
    images = tree.find_images(file_name) if file_name else []
    is_relative = not name.startswith(("/", "../"))
    # The usual case: only one image has the file name.
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
    # The name is a path below the label file's folder or below the root.
    folder = os.path.dirname(label_file)
    for base in (folder, tree.root):
        path = os.path.normpath(os.path.join(base, name.lstrip("/")))
        if path not in tree.image_set:
            continue
        if not (is_below(path, folder) or is_below(path, tree.root)):
            continue
        has_folders = "/" in name
        if has_folders or part == "all" or _part_of_image(tree, path) in (None, part):
            return path
    # The name is a path outside of both, such as "../images/1.jpg".
    outside = os.path.normpath(os.path.join(folder, name))
    if not is_relative and os.path.isfile(outside):
        return outside
    if len(images) > 1:
        images = _choose_best(tree, images, name, folder, part)
    if len(images) == 1:
        return images[0]
    return list(images)


def _names_sibling_folder(tree: FileTree, image: str, name: str) -> bool:
    """Returns whether a name is in another folder of images beside that of ``image``.

    Then ``image`` is a different image of the same file name. For example, the name "b/1.jpg" does
    not mean the image "a/1.jpg" if there are images in both "a" and "b".
    """
    *folders, _ = name.split("/")
    if not folders or image.endswith(os.sep + name.replace("/", os.sep)):
        return False
    folder = os.path.dirname(image)
    sibling = os.path.join(os.path.dirname(folder), folders[-1])
    return sibling != folder and sibling in tree.image_folders


def _part_of_image(tree: FileTree, path: str) -> str | None:
    """Returns the part that the folders of an image tell, or None."""
    return part_of(tree.relative(path), by_folder=True)


def _choose_best(tree: FileTree, images: list[str], name: str, folder: str, part: str) -> list[str]:
    """Returns the images of one file name that match the name in a label file best, at least one.

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
    """Returns how many folders one goes up and down from one folder to another."""
    common = os.path.commonpath([first, second]).rstrip(os.sep)
    distance = 0
    for path in (first, second):
        names = path[len(common) :].strip(os.sep).split(os.sep)
        distance += len([name for name in names if name])
    return distance


def find_ending(path: str, folders: Sequence[str], *, min_names: int = 1) -> str | None:
    """Returns the longest ending of a path that exists in one of ``folders``, or None.

    For example, "/home/ann/set/train/images" may exist as "train/images". The path may be of
    another machine, or of Windows. An ending has at least ``min_names`` names.
    """
    if len(path) > MAX_PATH:
        return None
    names = [name for name in re.split(r"[\\/]+", path) if name not in ("", ".", "..")]
    if names and names[0].endswith(":"):
        del names[0]
    for start in range(len(names) - min_names + 1):
        for folder in folders:
            path = os.path.join(folder, *names[start:])
            if os.path.exists(path):
                return path
    return None
