# Copyright (c) qbheat_det contributors. Apache-2.0.
"""All files of a data set's folder, walked once, and the kinds of label files among them."""

import os
import re
import unicodedata
import urllib.parse
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from qbheat_det.core.errors import UserError

from .account import LeftOut
from .image_suffixes import is_image, is_unread_image
from .label_kinds import LabelKind, find_kind

_SAMPLED = 40  # in larger groups of files of one suffix and folder, only a sample is opened
_SAMPLE = 5
_COMPANION_WORDS = frozenset(
    {
        *("mask", "masks", "segmentationclass", "segmentationobject", "segmentation", "semantic"),
        *("thumb", "thumbs", "thumbnail", "thumbnails", "preview", "previews"),
    }
)
_CACHED = (
    *("all_images", "image_set", "image_folders", "companions", "label_files", "_images_by_name"),
)
_IGNORED = ("__MACOSX",)  # copies of files' properties in zips of macOS


def walk(
    root: str, known: Collection[str] = (), skipped: list[LeftOut] | None = None
) -> Iterator[str]:
    """Yields the files below a folder, sorted by name, files before subfolders.

    Hidden names are skipped. Links to folders outside are followed once, after all other folders.

    Args:
        root: the folder, absolute.
        known: folders that are not walked again.
        skipped: a list to which links and folders that are not walked are added.

    Raises:
        UserError: the root does not exist, or cannot be read.
    """
    if not os.path.isdir(root):
        state = "is a file" if os.path.exists(root) else "does not exist"
        raise UserError(f"the folder '{root}' {state}")
    skipped = [] if skipped is None else skipped
    walked = [os.path.realpath(path) for path in (root, *known)]
    folders: list[str] = [root]
    links: list[str] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        if folder in known:
            continue
        if os.path.islink(folder) and folder != root:
            target = os.path.realpath(folder)
            if any(is_below(target, other) or is_below(other, target) for other in walked):
                reason = f"it is a link to '{target}', which is searched already"
                skipped.append(LeftOut("behind a link", folder, reason, "other file", False))
                continue
            walked.append(target)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            if folder == root:
                raise UserError(f"the folder '{root}' cannot be read: {error.strerror}") from error
            reason = f"it cannot be read: {error.strerror}"
            skipped.append(LeftOut("in a closed folder", folder, reason, "other file"))
            continue
        below: list[str] = []
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _IGNORED:
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:
                is_folder = is_file = False
            if is_folder:
                (links if entry.is_symlink() else below).append(entry.path)
            elif is_file:
                yield entry.path
            else:
                reason = "it is a link to nothing, or no regular file"
                skipped.append(LeftOut("that cannot be opened", entry.path, reason, "other file"))
        folders += reversed(below)


class FileTree:
    """The files below folders. Hidden files and folders are skipped, and links are followed once.

    Attributes:
        root: the first folder. Names in label files are relative to it.
        label_file: the only file that may have labels; None if all may.
        images: paths of images, by folder and name, files before subfolders.
        unread_images: paths of images in formats that are not read.
        others: paths of all other files.
        skipped: links that are not followed.
        preferred: folder whose images are preferred among those of one name; "" for none.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        label_file: str | Path | None = None,
        kinds: Sequence[LabelKind] = (),
    ) -> None:
        """
        Args:
            root: folder to walk.
            label_file: the only file that may have labels; None for any file below ``root``.
            kinds: the kinds of label files to look for.

        Raises:
            UserError: a folder does not exist, or cannot be read.
        """
        self.root = os.path.abspath(root)
        self._kinds = tuple(kinds)
        self._per_image = {kind.name for kind in kinds if kind.has_one_image}
        self._roots: list[str] = []
        self.label_file = os.path.abspath(label_file) if label_file else None
        self.images: list[str] = []
        self.unread_images: list[str] = []
        self.others: list[str] = []
        self.skipped: list[LeftOut] = []
        self.preferred = ""
        self.add(self.root)

    @property
    def is_of_one_file(self) -> bool:
        """Whether only one file may have labels."""
        return self.label_file is not None

    def add(self, folder: str | Path) -> None:
        """Walks another folder, if it is not below a folder that was walked before."""
        path = os.path.abspath(folder)
        if any(is_below(path, root) for root in self._roots):
            return
        for name in _CACHED:
            self.__dict__.pop(name, None)
        self._roots.append(path)
        for file in walk(path, self._roots[:-1], self.skipped):
            if is_image(file):
                self.images.append(file)
            elif is_unread_image(file):
                self.unread_images.append(file)
            else:
                self.others.append(file)

    def prefer(self, folder: str | Path) -> None:
        """Walks a folder, and prefers its images among those of one name."""
        self.add(folder)
        self.preferred = os.path.abspath(folder)

    @property
    def other_roots(self) -> list[str]:
        """The folders that have been added."""
        return self._roots[1:]

    def has(self, path: str) -> bool:
        """Returns whether a path is below one of the folders."""
        return any(is_below(os.path.normpath(path), root) for root in self._roots)

    def relative(self, path: str) -> str:
        """Returns a path relative to the root that contains it."""
        for root in self._roots:
            if path.startswith(root + os.sep):
                return path[len(root) + 1 :]
        return os.path.relpath(path, self.root)

    @cached_property
    def all_images(self) -> list[str]:
        """Paths of images in all formats, without ``companions``; those not read are last."""
        return [path for path in (*self.images, *self.unread_images) if path not in self.companions]

    @cached_property
    def companions(self) -> frozenset[str]:
        """Masks and previews of other images.

        These are the images in folders of such names, if at least half of them are named like
        images elsewhere.
        """
        own: dict[str, list[str]] = defaultdict(list)
        others: set[str] = set()
        for path in (*self.images, *self.unread_images):
            folder = os.path.dirname(path)
            words = {word for name in self.relative(folder).split(os.sep) for word in _split(name)}
            if words & _COMPANION_WORDS:
                own[folder].append(path)
            else:
                others.add(stem_of(path))
        return frozenset(
            path
            for paths in own.values()
            if 2 * sum(stem_of(path) in others for path in paths) >= len(paths)
            for path in paths
        )

    @cached_property
    def image_set(self) -> frozenset[str]:
        """``all_images`` as a set."""
        return frozenset(self.all_images)

    @cached_property
    def image_folders(self) -> frozenset[str]:
        """The folders of ``all_images``."""
        return frozenset(map(os.path.dirname, self.all_images))

    @cached_property
    def _images_by_name(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Images by exact names and stems, and by folded ones."""
        exact: dict[str, list[str]] = defaultdict(list)
        folded: dict[str, list[str]] = defaultdict(list)
        for path in self.all_images:
            name = os.path.basename(path)
            for key in {name, stem_of(name)}:
                exact[key].append(path)
            for key in {fold(name), fold(stem_of(name))}:
                folded[key].append(path)
        return exact, folded

    def find_images(self, name: str) -> list[str]:
        """Returns the images whose file name is ``name``, with or without a suffix.

        If there are none, names that are equal up to case, Unicode form and percent signs are
        returned, and last, those that differ in the suffix only.
        """
        exact, folded = self._images_by_name
        if found := exact.get(name):
            return found
        stem = os.path.splitext(name)[0]
        return (
            folded.get(fold(name))
            or folded.get(fold(urllib.parse.unquote(name)))
            or exact.get(stem)
            or folded.get(fold(stem))
            or []
        )

    @cached_property
    def label_files(self) -> dict[str, list[str]]:
        """Maps kinds, such as "coco", "voc" or "yolo", to the label files of that kind."""
        kinds: dict[str, list[str]] = defaultdict(list)
        if self.label_file:
            kind = self._find_kind_of_given(self.label_file)
            kinds[kind].append(self.label_file)
            if not any(one.name == kind and one.names_others for one in self._kinds):
                kinds.pop("", None)
                return kinds
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for path in self.others:
            if path == self.label_file:
                continue
            groups[os.path.dirname(path), os.path.splitext(path)[1].lower()].append(path)
        for files in groups.values():
            found = self._find_kinds(files)
            # A file beside others, named like an image, has its labels, even if it is damaged.
            usual = next((kind for kind in found if kind in self._per_image), "")
            for path, kind in zip(files, found, strict=True):
                kinds[kind or (usual if self.find_images(stem_of(path)) else "")].append(path)
        kinds.pop("", None)
        return kinds

    def _find_kinds(self, files: Sequence[str]) -> list[str]:
        """Returns the kinds of the files of one suffix in a folder, from a sample if they are many.

        Empty files beside others are of the same kind, and have no objects.
        """
        if len(files) > _SAMPLED:
            of_images = [path for path in files if self.find_images(stem_of(path))]
            sample = of_images[:: max(1, len(of_images) // _SAMPLE)]
            kinds = {find_kind(path, self._kinds) for path in sample} - {"", "empty"}
            if len(kinds) == 1 and kinds <= self._per_image:
                (name,) = kinds
                own = set(of_images)
                return [name if path in own else find_kind(path, self._kinds) for path in files]
        found = [find_kind(path, self._kinds) for path in files]
        usual = next((kind for kind in found if kind in self._per_image), "")
        return [usual if kind == "empty" else kind for kind in found]

    def _find_kind_of_given(self, path: str) -> str:
        """Returns the kind of the only label file.

        If its content matches no kind, it is of the only kind of its suffix, if there is one, so
        that its reader tells what is wrong.
        """
        suffix = os.path.splitext(path)[1].lower()
        possible = [kind.name for kind in self._kinds if suffix in kind.suffixes]
        kind = find_kind(path, self._kinds).replace("empty", "")
        return kind or (possible[0] if len(possible) == 1 else "")

    def list_other_labels(self, kind: str) -> list[str]:
        """Returns the label files of one image each that are of another kind."""
        others = self._per_image - {kind}
        return [path for other in sorted(others) for path in self.label_files.get(other, ())]


def _split(name: str) -> list[str]:
    return re.split(r"[\W_\d]+", name.lower())


def stem_of(path: str) -> str:
    """Returns the name of a file without its suffix."""
    return os.path.splitext(os.path.basename(path))[0]


def fold(name: str) -> str:
    """Returns a name in one Unicode form and lower case, to compare it with others."""
    return unicodedata.normalize("NFC", name).casefold()


def is_below(path: str, folder: str) -> bool:
    """Returns whether a path is a folder or lies below it. Both are absolute."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
