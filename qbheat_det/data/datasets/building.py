# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts the labels of a part of a data set, in any format, to COCO's lists.

The reader of each format returns ``LabelledImage`` objects. ``build_annotations`` reads missing
image sizes, leaves out invalid boxes, clips boxes to their image, and assigns ids. No other code
counts the used and left out boxes in an ``Account``.
"""

import os
from collections.abc import Iterator, Sequence

from qbheat_det.core.text import join_first
from qbheat_det.data.checks import DataError, short
from qbheat_det.data.images import read_sizes

from .account import OF_LEFT_OUT_IMAGES, Account, LeftOut
from .annotated import join_keys
from .annotations import Annotations, Entry
from .file_tree import FileTree
from .formats import Labels
from .image_suffixes import describe_format, is_image_name, suffix_of
from .labelled_image import MARGIN, XYWH, Box, LabelledImage


def build_annotations(
    tree: FileTree, labels: Labels, categories: Sequence[Entry], origin: str, account: Account
) -> Annotations:
    """Converts the labels of a part of a data set to COCO's lists.

    Args:
        tree: the files of the data set.
        labels: the labels of the part. Its images are changed.
        categories: the classes of the data set, as COCO's list.
        origin: path of the data set, for messages.
        account: account of the data set, to which used and left out items are added.
    """
    num_entries = len(labels.images)
    _join_repeated(labels, account)
    _leave_out_unread(tree, labels.images)
    if not labels.problem:  # images without labels need no size
        _read_sizes(labels.images)
    account.left_out += labels.left_out
    account.notes += [note for note in labels.notes if note not in account.notes]
    root = _find_root(tree, labels)
    result = Annotations(
        origin=origin,
        image_root=root,
        images=[],
        annotations=[],
        categories=list(categories),
        account=account,
    )
    builder = _AnnotationBuilder(categories, account, result)
    ids = _choose_ids([image.id for image in labels.images if image.exclusion is None])
    num_other_suffixes = 0
    outside = []
    for image in labels.images:
        if image.exclusion is not None:
            _leave_out_image(image, account)
            continue
        if image.file.startswith(root + os.sep):
            name = image.file[len(root) + 1 :]
        else:
            name = os.path.relpath(image.file, root)
            if name.startswith("..") and not tree.has(image.file):
                outside.append(name)
        entry = {**image.fields, "id": next(ids), "file_name": name}
        if image.size:
            entry["width"], entry["height"] = image.size
        if image.fields and entry != image.fields:
            builder.is_changed = True
        result.images.append(entry)
        builder.add(image, entry)
        # A label file may name an image with another suffix than the image has.
        if is_image_name(image.name) and suffix_of(image.name) != suffix_of(image.file):
            num_other_suffixes += 1
    result.annotations = builder.assign_ids()
    result.problem = labels.problem
    if num_other_suffixes:
        account.notes.append(f"{num_other_suffixes:,} images are named with another suffix")
    if outside:
        account.notes.append(f"{len(outside):,} images are outside '{tree.root}': {outside[0]}")
    # If nothing was changed or left out, a COCO file can be used as it is.
    is_changed = (
        builder.is_changed
        or bool(labels.notes)
        or bool(labels.left_out)
        or len(result.images) < num_entries
    )
    if labels.is_original and not is_changed:
        result.original = labels.files[0]
    return result


def _find_root(tree: FileTree, labels: Labels) -> str:
    """Returns the folder to which ``file_name`` in COCO's list of images will be relative.

    If the labels are one COCO file whose names are all relative to one folder, it is this folder.
    Then the file can be used as it is. Otherwise, it is the tree's root.
    """
    images = [image for image in labels.images if image.exclusion is None]
    if not labels.is_original or not images:
        return tree.root
    root = images[0].file.removesuffix(images[0].name).rstrip(os.sep)
    prefix = root + os.sep
    is_common = all(image.file == prefix + image.name for image in images)
    if is_common and tree.has(root):
        return root
    return tree.root


def _join_repeated(labels: Labels, account: Account) -> None:
    """Joins entries for the same image file, so that ``labels.images`` has each file once.

    If one label file has several entries for an image, their boxes are joined. If several label
    files have entries for it, only those of the first file are used. If entries with different
    folders in their names were matched to one image, only those that match its path best are used.
    """
    groups: dict[str, list[LabelledImage]] = {}  # by image file
    for image in labels.images:
        if image.file and not image.exclusion:
            groups.setdefault(image.file, []).append(image)
    num_joined = 0
    repeated: set[int] = set()
    for file, group in groups.items():
        if len(group) == 1:
            continue
        first, *others = _select_best_folders(file, group)
        for image in others:
            repeated.add(id(image))  # the object's identity, as images are not hashable
            known_boxes = {(box.class_name, box.xywh) for box in first.boxes}
            if image.entry_file == first.entry_file:
                first.boxes += [
                    box for box in image.boxes if (box.class_name, box.xywh) not in known_boxes
                ]
                first.left_out_boxes += image.left_out_boxes
                first.fields = join_keys(first.fields, image.fields)
                num_joined += 1
                continue
            reason = f"the labels of '{file}' are those in '{first.entry_file}'"
            for box in image.boxes:
                account.left_out.append(
                    LeftOut(
                        kind="of an image with other labels",
                        where=box.location,
                        reason=reason,
                        item="box",
                        is_fault=(box.class_name, box.xywh) not in known_boxes,
                    )
                )
            account.left_out += image.left_out_boxes
    labels.images = [image for image in labels.images if id(image) not in repeated]
    if num_joined:
        account.notes.append(f"{num_joined:,} entries name an image again: their boxes are joined")


def _select_best_folders(file: str, group: list[LabelledImage]) -> list[LabelledImage]:
    """Returns the entries whose folders match the path of an image file best, at least one.

    The others are marked as missing, because they name an image of the same file name in another
    folder.

    Args:
        file: path of the image file.
        group: the entries for which this file was found.
    """
    folders_of_file = file.split(os.sep)[:-1]
    num_common = []
    for image in group:
        names = [name for name in image.name.replace("\\", "/").split("/") if name]
        num_common.append(_count_common_end(names[:-1], folders_of_file))
    kept = []
    for image, count in zip(group, num_common, strict=True):
        if count == max(num_common):
            kept.append(image)
        else:
            image.file = ""
            image.mark_missing(f"there is no image {short(image.name)}, only '{file}'")
    return kept


def _count_common_end(first: Sequence[str], second: Sequence[str]) -> int:
    """Returns the length of the longest common ending of two lists of folder names."""
    count = 0
    for name, other in zip(reversed(first), reversed(second), strict=False):
        if name != other:
            break
        count += 1
    return count


def _leave_out_unread(tree: FileTree, images: Sequence[LabelledImage]) -> None:
    """Leaves out images in formats that cannot be read."""
    unread = frozenset(tree.unread_images)
    for image in images:
        if image.exclusion is None and image.file in unread:
            kind, reason = describe_format(image.file)
            image.exclusion = LeftOut(kind=kind, where=f"image '{image.file}'", reason=reason)


def _read_sizes(images: Sequence[LabelledImage]) -> None:
    """Sets missing image sizes from the image files. Leaves out images that cannot be read."""
    without_size = [image for image in images if image.exclusion is None and not image.size]
    if not without_size:
        return
    sizes = read_sizes([image.file for image in without_size])
    for image, size in zip(without_size, sizes, strict=True):
        if isinstance(size, DataError):
            image.exclusion = LeftOut(
                kind="that cannot be read", where=size.where, reason=size.reason
            )
        else:
            image.size = size


def _leave_out_image(image: LabelledImage, account: Account) -> None:
    """Adds an image that is left out, its label file and its boxes to an account."""
    assert image.exclusion
    reason = image.exclusion
    account.left_out.append(reason)
    if image.label_file and reason.item != "label file":
        account.left_out.append(
            LeftOut(
                kind=OF_LEFT_OUT_IMAGES,
                where=image.label_file,
                reason=reason.reason,
                item="label file",
                is_fault=False,
            )
        )
    if image.file and reason.item == "label file":  # its image cannot be used without it
        kind = "with an unreadable label file"
        account.left_out.append(LeftOut(kind=kind, where=image.file, reason=reason.reason))
    account.leave_out_boxes_of(reason, len(image.boxes) + len(image.left_out_boxes))


def _choose_ids(ids: Sequence[int | None]) -> Iterator[int]:
    """Yields ``ids`` if all are given and different, or else 1, 2, 3 and so on."""
    numbers = [id_ for id_ in ids if id_ is not None]
    if len(numbers) == len(ids) == len(set(numbers)):
        return iter(numbers)
    return iter(range(1, len(ids) + 1))


class _AnnotationBuilder:
    """Collects the boxes of all images as COCO's annotations.

    Attributes:
        is_changed: whether an annotation differs from the one in the label file.
    """

    def __init__(self, categories: Sequence[Entry], account: Account, result: Annotations) -> None:
        """
        Args:
            categories: the classes of the data set, as COCO's list.
            account: account of the data set, which is changed.
            result: annotations of the part, whose ``label_files`` and ``clipped`` are changed.
        """
        self.is_changed = False
        self._account = account
        self._result = result
        self._category_ids: list[int] = [category["id"] for category in categories]
        self._index_of_name = {
            str(category["name"]): index for index, category in enumerate(categories)
        }
        self._entries: list[Entry] = []

    def add(self, image: LabelledImage, entry: Entry) -> None:
        """Adds the valid boxes of an image, and counts them, the image and its label file as used.

        ``entry`` is the image's entry in COCO's list of images.
        """
        account = self._account
        if image.file in self._account.files:
            # Another part has the image too, and has counted it. This account is not read.
            account = Account()
        self._account.files.add(image.file)
        account.used["image"] += 1
        account.left_out += image.left_out_boxes
        if image.left_out_boxes:
            self.is_changed = True
        name = entry["file_name"]
        if image.label_file:
            self._result.label_files[name] = image.label_file
            account.used["label file"] += 1
        num_boxes_before = len(self._entries)
        num_clipped_before = len(account.clipped)
        seen: set[tuple[str, XYWH]] = set()
        for box in image.boxes:
            is_from_coco = bool(box.fields)
            if not is_from_coco:  # duplicates in COCO files are kept
                if (box.class_name, box.xywh) in seen:
                    reason = "the same box of the same class comes before"
                    account.left_out.append(
                        LeftOut(
                            kind="that repeats another",
                            where=box.location,
                            reason=reason,
                            item="box",
                            is_fault=False,
                        )
                    )
                    continue
                seen.add((box.class_name, box.xywh))
            category_id = self._find_category_id(box, account)
            if category_id is None:
                continue
            xywh = self._fit(box, image.size or (0, 0), account)
            if xywh is None:
                continue
            self._entries.append(
                {
                    **box.fields,
                    "image_id": entry["id"],
                    "category_id": category_id,
                    "bbox": xywh,
                    "iscrowd": int(box.is_crowd),
                }
            )
        account.used["box"] += len(self._entries) - num_boxes_before
        if len(account.clipped) > num_clipped_before:
            self._result.clipped[name] = account.clipped[num_clipped_before:]

    def _find_category_id(self, box: Box, account: Account) -> int | None:
        """Returns the id of a box's class, or None if the class is unknown.

        Then the box is left out, and added to the account.
        """
        index = box.class_index
        if index is None:
            index = self._index_of_name.get(box.class_name)
        if index is not None:
            return self._category_ids[index]
        known = join_first(self._index_of_name, 5)
        reason = f"its class {box.class_name!r} is not one of the classes {known}"
        account.left_out.append(
            LeftOut(kind="of an unknown class", where=box.location, reason=reason, item="box")
        )
        self.is_changed = True
        return None

    def _fit(self, box: Box, image_size: tuple[int, int], account: Account) -> list[float] | None:
        """Returns a box [x, y, width, height] in pixels, clipped to the image.

        Returns None if the box has no area or its center is outside of the image. Then it is left
        out.

        Args:
            box: the box.
            image_size: (width, height) in pixels.
            account: account to which the box is added if it is clipped or left out.
        """
        image_width, image_height = image_size
        x, y, width, height = box.xywh
        if box.is_relative:
            x *= image_width
            y *= image_height
            width *= image_width
            height *= image_height
        kind = ""
        if width < 0 or height < 0:
            kind = "with a negative side"
            reason = "its width or height is negative"
        elif not (width and height):
            kind = "without area"
            reason = "its width or height is 0"
        elif not (0 <= x + width / 2 <= image_width and 0 <= y + height / 2 <= image_height):
            kind = "outside of the image"
            reason = f"its centre lies outside the image of {image_width} x {image_height} pixels"
        if kind:
            self.is_changed = True
            reason += f": [{x:g}, {y:g}, {width:g}, {height:g}]"
            account.left_out.append(
                LeftOut(kind=kind, where=box.location, reason=reason, item="box")
            )
            return None
        right = x + width
        bottom = y + height
        if x >= 0 and y >= 0 and right <= image_width and bottom <= image_height:
            return [x, y, width, height]
        reaches_beyond = (
            min(x, y) < -MARGIN or right > image_width + MARGIN or bottom > image_height + MARGIN
        )
        is_from_coco = bool(box.fields)
        if is_from_coco and not reaches_beyond:  # rounded boxes in COCO files are kept
            return [x, y, width, height]
        if reaches_beyond:
            account.clipped.append(box.location)
        self.is_changed = True
        left = max(x, 0)
        top = max(y, 0)
        return [left, top, min(right, image_width) - left, min(bottom, image_height) - top]

    def assign_ids(self) -> list[Entry]:
        """Returns the annotations of all images, with new ids if ids are missing or repeated."""
        ids = [entry.get("id") for entry in self._entries]
        is_valid = all(type(id_) is int and abs(id_) < 2**53 for id_ in ids)
        if not is_valid or len(set(ids)) < len(ids):
            self.is_changed = True
            if self._entries and "id" in self._entries[0]:
                self._account.notes.append(
                    f"'{self._result.origin}': ids of annotations occur twice or are no numbers: "
                    "new ids are used"
                )
            for number, entry in enumerate(self._entries, start=1):
                entry["id"] = number
        return self._entries
