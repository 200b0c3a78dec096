# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What names of files and folders tell: the part and the folder of a data set.

A *part* of a data set is "train", "val", "test", or "all" if no name tells. The *base* of a label
file is the folder of its data set: the folder above ``annotations``, ``labels``, ``train`` and the
like.
"""

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterable

from .file_tree import FileTree, stem_of

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

Folders = tuple[str, ...]
"""Names of nested folders, from the root of a tree of files on."""


@functools.lru_cache(maxsize=100_000)
def split_words(name: str) -> tuple[str, ...]:
    """Returns the words in a name in lower case, as in ("instances", "train", "2017")."""
    return tuple(word.lower() for word in _WORD.findall(name))


def simplify(words: tuple[str, ...]) -> tuple[str, ...]:
    """Removes plain words from a name's words, and the year in a name such as "train2017".

    Words of parts become the name of the part.
    """
    known = [_PART_OF_WORD.get(word, word) for word in words if word not in PLAIN_WORDS]
    if len(words) > 1:
        known = [word for word in known if not _YEAR.fullmatch(word)]
    return tuple(known)


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
