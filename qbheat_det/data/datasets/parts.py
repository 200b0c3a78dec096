# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which labelled images are for training, and which for validation."""

import dataclasses
from collections.abc import Mapping

from .account import Account
from .file_tree import FileTree
from .formats import Labels
from .labelled_image import LabelledImage
from .layout import part_of, sort_into_parts
from .recognition import choose_parts


def split_by_folders(
    tree: FileTree, labels: Labels, account: Account
) -> tuple[dict[str, str], dict[str, Labels]]:
    """Splits labels without parts by the images' folders, if these are named "train" and "val".

    Args:
        tree: the files of the data set.
        labels: the labels of all images.
        account: the account, to which a note is added if the labels are split.

    Returns:
        Two dicts. The first maps the roles "train" and "val" to the names of the parts, and the
        second maps the roles to the labels. If an image is in no such folder, both have the single
        role "all".
    """
    files = dict.fromkeys(image.file for image in labels.images if image.file)
    parts = sort_into_parts(tree, files, (), by_folder=True)
    roles = choose_parts(parts)
    if len(roles) < 2 or "all" in parts:
        return {"all": "all"}, {"all": labels}
    part_of_file = {file: part for part, paths in parts.items() for file in paths}
    train = dataclasses.replace(labels, images=[], is_original=False)
    val = dataclasses.replace(labels, images=[], is_original=False, left_out=[], notes=[])
    for image in labels.images:
        part = part_of_file.get(image.file, roles["train"])
        if part not in roles.values():
            image.leave_out(f"of the part '{part}'", "this part is not used", is_fault=False)
        if part == roles["val"]:
            val.images.append(image)
        else:
            train.images.append(image)
    names = " and ".join(f"'{part}'" for part in roles.values())
    account.notes.append(f"the folders of the images tell the parts {names}")
    return roles, {"train": train, "val": val}


def remove_overlap(
    tree: FileTree, labels: dict[str, Labels], roles: Mapping[str, str], account: Account
) -> None:
    """Leaves out training images that are in the validation part too.

    There are three special cases:

    - If an image is in the folder of one part, but the labels of the other part name an image of
      the same file name, the image of the other part is marked as missing.
    - If all training images are in the validation part, the validation part is removed.
    - If the validation part has no boxes, it is removed. Training then holds out other images.

    Args:
        tree: the files of the data set.
        labels: the labels of the roles "train" and "val", which are changed.
        roles: maps the roles to the names of the parts.
        account: the account, to which notes are added.
    """
    by_file: dict[str, dict[str, LabelledImage]] = {}  # role -> path of the image -> image
    for role, labels_of_part in labels.items():
        by_file[role] = {
            image.file: image
            for image in labels_of_part.images
            if image.file and not image.exclusion
        }
    in_both = []
    for file in by_file["train"].keys() & by_file["val"].keys():
        entries = {role: images[file] for role, images in by_file.items()}
        wrong = _find_wrong_entries(tree, file, entries, roles)
        if len(wrong) == 1:
            wrong[0].file = ""
            wrong[0].mark_missing(f"its image is not there, only '{file}' of another part")
        else:
            in_both.append(file)
    if in_both and len(in_both) == len(by_file["train"]):
        account.notes.append(
            f"the part '{roles['val']}' has all images of the part '{roles['train']}', and is not "
            "used for validation"
        )
        del labels["val"]
        return
    for file in in_both:
        image = by_file["train"][file]
        image.leave_out("of the validation part", "it is used for validation", is_fault=False)
    if in_both:
        account.notes.append(f"{len(in_both):,} images of the validation part are not trained on")
    val = labels["val"]
    usable = [image for image in val.images if image.exclusion is None]
    has_no_boxes = bool(usable) and not any(image.boxes for image in usable)
    if val.problem or not val.images or has_no_boxes:
        account.notes.append(f"the part '{roles['val']}' has no labels, and is not used")
        del labels["val"]


def _find_wrong_entries(
    tree: FileTree, file: str, entries: Mapping[str, LabelledImage], roles: Mapping[str, str]
) -> list[LabelledImage]:
    """Returns the entries for an image that are in the labels of another part than its folder.

    An entry is right if the image's name in the label file, or else the path of its label file,
    tells the same part as the folder of the image.

    Args:
        tree: the files of the data set.
        file: path of an image in the labels of both parts.
        entries: its entry in the labels of each role.
        roles: maps the roles to the names of the parts.
    """
    part_of_file = part_of(tree.relative(file), by_folder=True)
    if part_of_file not in roles.values():
        return []
    wrong = []
    for role, part in roles.items():
        entry = entries[role]
        name = entry.name or tree.relative(entry.label_file or entry.file)
        if part != part_of_file and part_of(name, by_folder=True) != part_of_file:
            wrong.append(entry)
    return wrong
