# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the names of folders and files say: parts of a data set, and which image a label file has.

A *part* is "train", "val", "test", or "all" if no name tells. The *base* of a label file is the
folder of its data set: the folder above ``annotations``, ``labels``, ``train`` and the like.
"""

import functools
import os
import re
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .file_tree import FileTree, fold, is_below, stem_of

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
_SAME = 3  # closeness of a folder to itself
_YEAR = re.compile(r"(19|20)\d\d")
# The order in which one of several images of one name is chosen.
_SUFFIX_ORDER = (".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff")

Folders = tuple[str, ...]


@functools.lru_cache(maxsize=100_000)
def split_words(name: str) -> tuple[str, ...]:
    """Returns the words in a name in lower case, as in ("instances", "train", "2017")."""
    return tuple(word.lower() for word in _WORD.findall(name))


@functools.lru_cache(maxsize=100_000)
def part_of_name(name: str) -> str | None:
    """Returns the part that a file or folder name has as a word, or None."""
    parts = {_PART_OF_WORD[word] for word in split_words(name) if word in _PART_OF_WORD}
    return parts.pop() if len(parts) == 1 else None


def part_of(path: str, *, by_folder: bool = False) -> str | None:
    """Returns the part that the names in a relative path tell, or None.

    The last name that has a part decides. With ``by_folder``, the name of the file does not count,
    since "train" may be what an image shows.
    """
    return _find_part(path, by_folder=by_folder)[0]


def _find_part(path: str, *, by_folder: bool) -> tuple[str | None, str]:
    """Returns the part that the names in a relative path tell, and the name that tells it."""
    *folders, name = path.split(os.sep)
    names = [] if by_folder else [os.path.splitext(name)[0]]
    for each in (*names, *reversed(folders)):
        if part := part_of_name(each):
            return part, each
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
    folder = os.path.dirname(tree.relative(path))
    return tuple(folder.split(os.sep)) if folder else ()


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
        return {"all": [path for own in parts.values() for path in own]}
    return dict(parts)


def _goes_on(name: str) -> bool:
    """Returns whether a name has a word of its own after that of a part."""
    words = split_words(name)
    last = max(index for index, word in enumerate(words) if word in _PART_OF_WORD)
    rest = [word for word in words[last + 1 :] if word not in PLAIN_WORDS | _WORDS_OF_SETS]
    return any(len(word) > 1 and not word.isdecimal() for word in rest)


def find_lists_of_parts(tree: FileTree, folder: str) -> dict[str, str]:
    """Maps parts to text files in a folder that are named like them, such as "train.txt".

    A file "trainval.txt" has the part "all". Of two files of a part, the first is used.
    """
    lists: dict[str, str] = {}
    for path in tree.others:
        if os.path.dirname(path) == folder and path.lower().endswith(".txt"):
            words = split_words(stem_of(path))
            words = tuple(word for word in words if not _YEAR.fullmatch(word))
            if len(words) == 1 and words[0] in _PART_OF_WORD:
                part = "all" if words[0] == "trainval" else _PART_OF_WORD[words[0]]
                lists.setdefault(part, path)
    return lists


def group_by_base(tree: FileTree, files: Iterable[str]) -> dict[Folders, list[str]]:
    """Maps the folders of data sets to their label files."""
    groups: dict[Folders, list[str]] = defaultdict(list)
    for path in files:
        groups[base_of(folders_of(tree, path))].append(path)
    return dict(groups)


def group_per_image_files(tree: FileTree, files: Iterable[str]) -> dict[Folders, list[str]]:
    """Maps the folders of data sets to their label files, of which each has one image.

    Folders that only sort the images, such as one per camera, belong to one data set. They have no
    folder of their own for labels.
    """
    groups = group_by_base(tree, files)
    plain = {base for base, own in groups.items() if folders_of(tree, own[0]) == base}
    if len(plain) < 2:
        return groups
    merged = [path for base in groups for path in groups[base] if base in plain]
    common = tuple(os.path.commonpath([os.path.join(os.sep, *b) for b in plain]).split(os.sep)[1:])
    common = tuple(filter(None, common))
    rest = {base: own for base, own in groups.items() if base not in plain}
    return {**rest, common: [*rest.pop(common, []), *merged]}


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
    found = {file: neighbours.find(file) for file in label_files}
    # Folders such as "labels_old" and "predict/labels" have labels of the same images.
    best: dict[str, int] = defaultdict(int)
    for closeness, images in found.values():
        for path in images:
            best[os.path.dirname(path)] = max(best[os.path.dirname(path)], closeness)
    owners: dict[str, str] = {}
    unpaired: list[str] = []
    for label_file, (closeness, images) in found.items():
        folders = {os.path.dirname(path) for path in images}
        if not images:
            unpaired.append(label_file)
        elif all(best[folder] > closeness for folder in folders):
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
        folder, stem = os.path.dirname(label_file), stem_of(label_file)
        for closeness, folders in self._rank(folder):
            found = [path for own in folders for path in self._images.get((own, stem), ())]
            if found:
                return closeness, found
        images = find_images_of_stem(self._tree, stem)
        for closeness, folders in self._rank(folder):
            found = [path for path in images if os.path.dirname(path) in folders]
            if found:
                return closeness, found
        return 0, []

    def _rank(self, folder: str) -> list[tuple[int, list[str]]]:
        """Returns (closeness, folders of images) that fit to a folder of labels, best first."""
        if folder not in self._ranked:
            groups: dict[int, list[str]] = defaultdict(list)
            for other in self._folders:
                groups[_measure_closeness(folder, other)].append(other)
            groups.pop(0, None)
            self._ranked[folder] = sorted(groups.items(), reverse=True)
        return self._ranked[folder]


def find_images_of_stem(tree: FileTree, stem: str) -> list[str]:
    """Returns the images that are named like a label file without its suffix."""
    for name in (stem, urllib.parse.unquote(stem)):
        wanted = fold(name)  # some tools name the label file of a.jpg "a.jpg.txt"
        images = tree.find_images(name)
        same = [
            path for path in images if wanted in (fold(os.path.basename(path)), fold(stem_of(path)))
        ]
        if same:
            return same
    return []


def _assign(
    pairs: Pairs, owners: dict[str, str], label_file: str, images: Sequence[str], named: str
) -> None:
    """Assigns one of several images of one folder to a label file, if it is free."""

    def rank(path: str) -> tuple[bool, int, str]:
        suffix = os.path.splitext(path)[1].lower()
        order = _SUFFIX_ORDER.index(suffix) if suffix in _SUFFIX_ORDER else len(_SUFFIX_ORDER)
        return os.path.basename(path) != named, order, path

    chosen, *others = sorted(images, key=rank)
    if chosen in owners:
        reason = f"'{chosen}' has the labels of '{owners[chosen]}'"
        pairs.orphans[label_file] = reason
        return
    owners[chosen] = label_file
    pairs.image_of[label_file] = chosen
    pairs.doubles.update(dict.fromkeys(others, chosen))


def fits_one(image: str, label_file: str, folders: Collection[str]) -> bool:
    """Returns whether an image is in one of some folders, and can belong to a label file."""
    folder = os.path.dirname(image)
    return folder in folders and _measure_closeness(os.path.dirname(label_file), folder) > 0


def _measure_closeness(first: str, second: str) -> int:
    """Returns how well two folders fit: 0 if they cannot belong together, up to 4.

    "images" and "labels" at one place in the path fit better than one folder, as in YOLO.
    """
    if first == second:
        return _SAME
    if _replace_images(second) == first:
        return _SAME + 1
    own, other = _list_names(first, second), _list_names(second, first)
    if own == other:
        return _SAME - 1
    return 0 if own and other else 1


def _replace_images(folder: str) -> str:
    """Replaces the last name "images" in a path by "labels"."""
    names = folder.split(os.sep)
    if "images" not in names:
        return ""
    last = len(names) - 1 - names[::-1].index("images")
    return os.sep.join([*names[:last], "labels", *names[last + 1 :]])


def _list_names(folder: str, other: str) -> list[tuple[str, ...]]:
    """Returns the names in a path below the common folder of both, without plain words."""
    common = os.path.commonpath([folder, other])
    names = folder[len(common) :].strip(os.sep).split(os.sep)
    simple = (_simplify(split_words(name)) for name in names)
    return [words for words in simple if words]


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
        images = {file: find_images_of_stem(tree, stem_of(file)) for file in files}
        counts = Counter(
            place
            for own in images.values()
            for place in {os.path.dirname(path) for path in own}
            if place not in used and not _has_telling_name(folder, place)
        )
        chosen = next(iter(counts)) if len(counts) == 1 and folder not in with_labels else None
        for file in files:
            own = [path for path in images[file] if os.path.dirname(path) == chosen]
            if own:
                _assign(pairs, owners, file, own, named.get(file, ""))
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
    last = name.rpartition("/")[2]
    found = tree.find_images(last) if last else []
    is_relative = not name.startswith(("/", "../"))
    named_part = part_of(name, by_folder=True) if "/" in name else None
    if len(found) == 1 and _is_of_sibling(tree, found[0], name):
        return []
    if len(found) == 1 and is_relative:
        own_part = _part_of_image(tree, found[0])
        return found[0] if not (named_part and own_part) or named_part == own_part else []
    folder = os.path.dirname(label_file)
    for base in (folder, tree.root):
        path = os.path.normpath(os.path.join(base, name.lstrip("/")))
        if path in tree.image_set and any(is_below(path, each) for each in (folder, tree.root)):
            same_part = part == "all" or _part_of_image(tree, path) in (None, part)
            if same_part or "/" in name:
                return path
    outside = os.path.normpath(os.path.join(folder, name))
    if not is_relative and os.path.isfile(outside):
        return outside
    if len(found) > 1:
        found = _narrow(tree, found, name, folder, part)
    return found[0] if len(found) == 1 else list(found)


def _is_of_sibling(tree: FileTree, path: str, name: str) -> bool:
    """Returns whether a name tells another folder of images beside that of a path."""
    *folders, _ = name.split("/")
    if not folders or path.endswith(os.sep + name.replace("/", os.sep)):
        return False
    own = os.path.dirname(path)
    return own != (other := os.path.join(os.path.dirname(own), folders[-1])) and (
        other in tree.image_folders
    )


def _part_of_image(tree: FileTree, path: str) -> str | None:
    return part_of(tree.relative(path), by_folder=True)


def _narrow(tree: FileTree, found: list[str], name: str, folder: str, part: str) -> list[str]:
    """Reduces images of one file name to those that fit best."""
    if tree.preferred:
        found = [path for path in found if is_below(path, tree.preferred)] or found
    for start in range(name.count("/") + 1):
        ending = "/" + "/".join(name.lstrip("/").split("/")[start:])
        same = [path for path in found if path.replace(os.sep, "/").endswith(ending)]
        if same:
            found = same
            break
    if len(found) > 1 and part != "all":
        same = [path for path in found if _part_of_image(tree, path) == part]
        found = same or found
    if len(found) > 1:
        distances = {path: _measure_distance(folder, os.path.dirname(path)) for path in found}
        nearest = min(distances.values())
        found = [path for path in found if distances[path] == nearest]
    return found


@functools.lru_cache(maxsize=10_000)
def _measure_distance(first: str, second: str) -> int:
    """Returns the number of steps between two folders in the tree of folders."""
    common = os.path.commonpath([first, second]).rstrip(os.sep)
    rests = (path[len(common) :].strip(os.sep) for path in (first, second))
    return sum(len(rest.split(os.sep)) for rest in rests if rest)


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
            found = os.path.join(folder, *names[start:])
            if os.path.exists(found):
                return found
    return None
