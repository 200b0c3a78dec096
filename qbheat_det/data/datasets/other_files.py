# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Accounts for the files of a data set that its labels do not name."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from qbheat_det.core.files import is_output_folder

from .account import Account, Item, LeftOut
from .file_tree import FileTree, is_below
from .formats.base import find_foreign_labels
from .image_suffixes import describe_format
from .layout import part_of
from .recognition import Recognized


def account_for_other_files(
    recognized: Recognized,
    path: str,
    mentioned: Collection[str],
    parts: Collection[str],
    account: Account,
) -> None:
    """Adds each file that is not in ``mentioned`` to the left out items of an account.

    Files in a folder that this package has written are added together, as one item.

    Args:
        recognized: the data set.
        path: the folder or file of the data set, as it was given.
        mentioned: files that the account has already: images of the labels, and label files.
        parts: names of the parts that are used.
        account: the account, which is changed.
    """
    tree = recognized.tree
    others = _explain_files(recognized, mentioned, parts)
    written_in = _find_output_folders(tree, mentioned)
    account.left_out += _join_output(others, written_in)
    account.left_out += tree.skipped
    if tree.root != path and os.path.isdir(path):
        whole = FileTree(path)
        outside = _list_outside(whole, tree, mentioned)
        written_in = _find_output_folders(whole, mentioned)
        account.left_out += _join_output(outside, written_in)
        account.left_out += [link for link in whole.skipped if not tree.has(link.where)]


def _explain_files(
    recognized: Recognized, mentioned: Collection[str], parts: Collection[str]
) -> dict[str, LeftOut]:
    """Returns why each file of a data set that is not in ``mentioned`` is left out, by path.

    ``parts`` are the names of the parts that are used.
    """
    tree = recognized.tree
    unread = frozenset(tree.unread_images)
    label_kinds = {file: kind for kind, files in tree.label_files.items() for file in files}
    kind_of_unused, reason_of_unused = _explain_unused(recognized, parts)
    foreign: Mapping[str, str] = {}
    if recognized.format:
        foreign = find_foreign_labels(tree, recognized.format.kinds[0].name)
    others: dict[str, LeftOut] = {}
    for file in (*tree.all_images, *tree.other_files):
        if file in mentioned:
            continue
        is_image = file in tree.image_set
        item: Item = "image" if is_image else "label file"
        is_fault = False
        part = part_of(tree.relative(file), by_folder=is_image)
        if not is_image and file not in label_kinds:
            item = "other file"
            kind = "without labels"
            reason = "it has no labels that are read"
        elif part and part not in parts and "all" not in parts:
            kind = f"of the part '{part}'"
            reason = "this part is not used"
        elif file in unread:
            kind = "in a format that is not read"
            reason = "and no label file names it"
        elif file in foreign:
            item = "image"
            is_fault = True
            kind = "with labels in another format"
            reason = f"its labels are in '{foreign[file]}'"
        elif is_image:
            kind = kind_of_unused
            reason = reason_of_unused
        else:
            kind = "not used"
            reason = f"its {label_kinds[file]} labels are not those of a used image"
        others[file] = LeftOut(kind, f"'{file}'", reason, item, is_fault)
    for file in sorted(tree.companions):
        others[file] = LeftOut(
            kind="in a folder of masks or previews",
            where=f"'{file}'",
            reason="it is named like an image",
            is_fault=False,
        )
    return others


def _list_outside(
    whole: FileTree, tree: FileTree, mentioned: Collection[str]
) -> dict[str, LeftOut]:
    """Returns the files of a folder that are outside the data set found in it, by path."""
    outside: dict[str, LeftOut] = {}
    for file in (*whole.all_images, *whole.other_files):
        if tree.has(file) or file in mentioned or file in tree.other_files:
            continue
        outside[file] = LeftOut(
            kind="outside the data set",
            where=f"'{file}'",
            reason="it is outside the folder of the data set",
            item="image" if file in whole.image_set else "other file",
            is_fault=False,
        )
    return outside


def _join_output(others: Mapping[str, LeftOut], written_in: Mapping[str, str]) -> list[LeftOut]:
    """Joins files that are output of this package to one item per folder.

    Args:
        others: files that are left out, by path.
        written_in: the outermost folder of output of each folder in it.
    """
    joined: list[LeftOut] = []
    num_written: Counter[str] = Counter()
    for file, left_out in others.items():
        folder = written_in.get(os.path.dirname(file))
        if folder:
            num_written[folder] += 1
        else:
            joined.append(left_out)
    for folder, count in num_written.items():
        joined.append(
            LeftOut(
                kind="that is a folder of output",
                where=f"'{folder}'",
                reason=f"its files ({count:,}) are output of this package",
                item="other file",
                is_fault=False,
            )
        )
    return joined


def _find_output_folders(tree: FileTree, mentioned: Collection[str]) -> dict[str, str]:
    """Maps the folders of files that this package has written to the outermost folder of output.

    A folder of output has no file that is in ``mentioned``, and is below the root of the tree.
    """
    files = (*tree.all_images, *tree.other_files, *tree.companions)
    folders = _list_folders_above(files, tree.root)
    in_use = _list_folders_above(mentioned, tree.root)
    written_in: dict[str, str] = {}
    for folder in sorted(folders):  # outer folders first
        above = written_in.get(os.path.dirname(folder))
        if above:
            written_in[folder] = above
        elif folder not in in_use and is_output_folder(folder):
            written_in[folder] = folder
    return written_in


def _list_folders_above(files: Iterable[str], root: str) -> set[str]:
    """Returns all folders between a root and the files below it, without the root."""
    folders: set[str] = set()
    for file in files:
        folder = os.path.dirname(file)
        while folder not in folders and folder != root and is_below(folder, root):
            folders.add(folder)
            folder = os.path.dirname(folder)
    return folders


def _explain_unused(recognized: Recognized, parts: Collection[str]) -> tuple[str, str]:
    """Returns ``LeftOut.kind`` and ``LeftOut.reason`` of images that belong to no used part."""
    labels = recognized.labels
    if labels is None:
        return "in no class folder", "only images in class folders are used"
    if labels.manifests:
        lists = " and ".join(f"'{file}'" for file in labels.manifests)
        return "in no part of the data set", f"it is not listed by {lists}"
    unused = sorted(set(labels.parts) - set(parts))
    if unused:
        names = ["what has no part" if part == "all" else f"'{part}'" for part in unused]
        return "outside the used parts", f"{' and '.join(names)} is not used"
    return "without labels", "no label file names it"


def account_for_classes(recognized: Recognized, path: str) -> Account:
    """Returns the account of a data set of class folders, which is at ``path``."""
    tree = recognized.tree
    folders = list(recognized.folders.values())
    account = Account(notes=list(recognized.notes))
    mentioned: set[str] = set()
    for file in tree.images:
        is_inside = any(is_below(file, folder) for folder in folders)
        if is_inside and os.path.dirname(file) not in folders:
            account.used["image"] += 1
            mentioned.add(file)
    for file in tree.all_images:
        if os.path.dirname(file) in folders:
            reason = f"it is in no class folder of '{os.path.dirname(file)}'"
            account.left_out.append(
                LeftOut(kind="in no class folder", where=f"'{file}'", reason=reason)
            )
            mentioned.add(file)
    for file in tree.unread_images:
        is_inside = any(is_below(file, folder) for folder in folders)
        if is_inside and file not in mentioned:
            kind, reason = describe_format(file)
            account.left_out.append(LeftOut(kind=kind, where=f"'{file}'", reason=reason))
            mentioned.add(file)
    account_for_other_files(recognized, path, mentioned, set(recognized.folders), account)
    return account
