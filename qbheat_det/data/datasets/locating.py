# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds the images and folders that label files name by paths, which may be of another machine."""

import functools
import os
import re
from collections.abc import Sequence

from .file_tree import FileTree, is_below
from .layout import part_of

MAX_PATH = 4096
"""Largest number of characters in a path. No system has longer ones."""


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
