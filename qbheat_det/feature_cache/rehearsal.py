# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encodes a few views in a dry run, to forecast time and disk space of a whole cache."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from detectron2.utils import comm

from .store import VIEWS_PER_FILE, AllViews, FeatureStore, Mapped, Stored


class FewViews(FeatureStore):
    """A store of a few views, which are returned for all indices."""

    def read(self, view_index: int) -> Stored:
        return super().read(view_index % self.num_views)


class Rehearsal:
    """Replaces the building of caches, and adds up what the whole caches would cost.

    Attributes:
        num_views: views of the run that are not cached yet.
        seconds: time to encode these views with all processes.
        num_bytes: their size on the disk.
        free_bytes: free space of that disk.
        spent: seconds that the rehearsal itself took.
    """

    def __init__(self, folder: Path, *, test_scale: float = 1.0) -> None:
        """
        Args:
            folder: temporary folder for the few views.
            test_scale: number of test images of the whole run per test image of the dry run.
        """
        self._folder = folder / f"few_{comm.get_rank()}"
        self._test_scale = test_scale
        self._num_stores = 0
        self.num_views = self.num_bytes = self.free_bytes = 0
        self.seconds = self.spent = 0.0

    def encode(
        self,
        store: FeatureStore,
        views: AllViews,
        encode: Callable[[list[Mapped]], list[Stored]],
        *,
        is_train: bool,
        num_workers: int,
    ) -> FewViews:
        """Returns a store with a few of the views, instead of filling ``store``.

        The arguments are those of ``fill``.
        """
        begin = time.perf_counter()
        number = min(VIEWS_PER_FILE, len(views))
        encode([views[0]])  # warm-up
        start = time.perf_counter()
        entries = [views[i * len(views) // number] for i in range(number)]
        loading = time.perf_counter() - start
        encoded = encode(entries)
        encoding = time.perf_counter() - start - loading
        few = FewViews(self._folder / str(self._num_stores), number, dtype=store.dtype)
        few.write(0, encoded)
        self._num_stores += 1

        missing = sum(len(store.views_of(file)) for file in store.missing())
        missing = round(missing * (1.0 if is_train else self._test_scale))
        seconds = max(loading / num_workers, encoding) if num_workers else loading + encoding
        self.num_views += missing
        self.seconds += seconds * missing / number / comm.get_world_size()
        self.num_bytes += round(few.path_of(0).stat().st_size * missing / number)
        disk = next(folder for folder in store.folder.absolute().parents if folder.is_dir())
        self.free_bytes = shutil.disk_usage(disk).free
        self.spent += time.perf_counter() - begin
        return few
