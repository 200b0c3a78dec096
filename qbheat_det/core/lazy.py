# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Imports that wait until they are needed, so that an exported file runs without PyTorch.

``import qbheat_det`` imports neither PyTorch nor Detectron2. ``qbheat_det/registration.py``
registers the models and data sets of this package with them. It is imported at the first of these
events:

- a name of ``qbheat_det`` other than ``load`` and ``Detector`` is used,
- a module of this package is imported that is not in one of ``_AREAS_WITHOUT_PYTORCH``,
- Detectron2 or timm is imported, before this package or after it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_PACKAGE = "qbheat_det"
_REGISTRATION = f"{_PACKAGE}.registration"
# Modules in these areas import PyTorch late, or through a module of another area.
_AREAS_WITHOUT_PYTORCH = ("api", "core", "inference")
# Libraries in whose registries the names of this package are looked up.
_LIBRARIES = ("detectron2", "timm")


def import_name(owner: str, name: str, modules: Mapping[str, str]) -> Any:
    """Returns a name of the module ``owner`` from the module in which ``modules`` places it.

    Raises an ``AttributeError`` for other names.
    """
    if name not in modules:
        raise AttributeError(f"module '{owner}' has no attribute '{name}'")
    return getattr(importlib.import_module(modules[name]), name)


def register() -> None:
    """Registers the models and data sets of this package, once."""
    if _REGISTRATION not in sys.modules:
        importlib.import_module(_REGISTRATION)


def register_when_needed() -> None:
    """Registers now if a library has been imported, or else at the first import that needs it.

    The user's modules in ``$QBHEAT_IMPORT`` may register classes as well, so they are never late.
    """
    is_imported = any(sys.modules.get(name) is not None for name in _LIBRARIES)
    if is_imported or os.environ.get("QBHEAT_IMPORT"):
        register()
    else:
        sys.meta_path.insert(0, _RegisteringFinder())


class _RegisteringFinder(importlib.abc.MetaPathFinder):
    """Registers at the first import that needs it. Leaves the search for modules to Python."""

    def __init__(self) -> None:
        self._is_searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns None, so that Python looks for the module itself, with two exceptions.

        For a library, returns a spec whose loader registers after the import. For a module that the
        registration has imported, returns a spec of this module.
        """
        if self._is_searching or _REGISTRATION in sys.modules:
            return None
        if fullname in _LIBRARIES:
            return self._find_library(fullname)
        package, _, module_name = fullname.partition(".")
        area = module_name.partition(".")[0]
        if package != _PACKAGE or area in _AREAS_WITHOUT_PYTORCH or fullname == _REGISTRATION:
            return None
        register()
        if fullname not in sys.modules:
            return None
        return importlib.util.spec_from_loader(fullname, _ImportedModule(fullname))

    def _find_library(self, name: str) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a library, whose loader registers after the import."""
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


class _ImportedModule(importlib.abc.Loader):
    """Returns a module that has been imported while Python looked for it."""

    def __init__(self, name: str) -> None:
        self._module = sys.modules[name]
        self._spec = self._module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own spec back, which Python has replaced."""
        module.__spec__ = self._spec
