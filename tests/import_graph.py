# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Who imports whom inside the package, read from the files without running them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "qbheat_det"

# Areas that are several files of ``modeling``.
FILES = {
    "modeling.parts": {  # used by several kinds of models
        "modeling.annotated_classes",
        "modeling.atss",
        "modeling.cached_images",
        "modeling.checks",
        "modeling.image_model",
        "modeling.losses",
        "modeling.pooling",
    },
    "modeling.dense_detectors": {
        "modeling.dense_predictions",
        "modeling.dense_pseudo_labels",
        "modeling.fcos",
        "modeling.kept_classes",
        "modeling.loss_normalizer",
        "modeling.retinanet",
    },
}

BASE = {"core", "config", "layers", "modeling.contracts"}
PARTS = BASE | {"modeling.parts"}
MIDDLE = BASE | {"data", "checkpoint", "solver", "evaluation", "tasks"}
_KINDS = ("backbone", "pretrain", "detr", "dense_detectors", "classification", "joined")
MODELING = {f"modeling.{name}" for name in _KINDS}
CACHE = {"feature_cache"}
INFERENCE = MIDDLE | MODELING | {"deployment", "fast", "inference", "model_zoo", "probing"}

# Which areas each area may import, besides itself. `docs/architecture.md` explains the table.
ALLOWED = {
    "core": set(),
    "modeling.contracts": set(),
    "config": {"core"},
    "layers": {"core", "config"},
    "data": BASE,
    "checkpoint": BASE,
    "solver": BASE,
    "evaluation": BASE | {"data"},
    "tasks": BASE | {"data", "evaluation"},
    "modeling.parts": BASE,
    **dict.fromkeys(MODELING, PARTS),
    "modeling.distillation_teacher": PARTS | {"modeling.backbone"},
    "modeling.pretrain": PARTS | {"modeling.distillation_teacher"},
    "feature_cache": MIDDLE | {"modeling.parts", "modeling.distillation_teacher"},
    # Subclasses of layers and of models' blocks.
    "fast": BASE | MODELING,
    # Names no model class.
    "engine": MIDDLE | CACHE | {"fast"},
    "probing": MIDDLE | MODELING,
    "deployment": MIDDLE | MODELING | {"fast"},
    "model_zoo": MIDDLE | MODELING,
    "inference": INFERENCE,
    "export": INFERENCE,
    "analysis": INFERENCE | CACHE | {"engine"},
    "api": INFERENCE | CACHE | {"analysis", "engine", "export"},
    "labelling": {"core", "data", "analysis", "api", "engine"},
    "app": {"core", "tasks", "analysis", "api", "labelling", "model_zoo"},
}
# These collect what is below them, for registration.
COLLECTORS = {PACKAGE, f"{PACKAGE}.modeling", f"{PACKAGE}.registration"}


def area_of(module):
    """Returns the key of ``ALLOWED`` that a dotted module of the package belongs to."""
    parts = module.split(".")
    for area, files in FILES.items():
        if ".".join(parts[1:3]) in files:
            return area
    return next((area for end in (3, 2) if (area := ".".join(parts[1:end])) in ALLOWED), None)


@cache
def parse(path):
    """Returns a file, parsed once."""
    return ast.parse(path.read_text("utf-8"))


def imported_names(tree, module, is_package):
    """Yields what the imports of a parsed file name, absolute, at any depth of the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") + (["__init__"] if is_package else [])
                base = ".".join([*parts[: -node.level], *([base] if base else [])])
            # ``from package import name``: the name may be a module.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_files(root=ROOT, package=PACKAGE):
    """Returns all files of a top-level package by their dotted module."""
    files = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return files


def imports(root=ROOT, package=PACKAGE):
    """Returns for each module of a package the names inside that package that it imports."""
    return {
        module: {
            name
            for name in imported_names(parse(path), module, path.name == "__init__.py")
            if name.split(".")[0] == package
        }
        for module, path in module_files(root, package).items()
    }


def file_graph(root=ROOT, package=PACKAGE):
    """Returns for each module of a package the modules of the package that it imports.

    An import of a module below a package does not count as an import of the package's
    ``__init__``: Python runs that file, but the reader does not need it.
    """
    found = imports(root, package)
    graph = {}
    for module, names in found.items():
        targets = {name if name in found else name.rpartition(".")[0] for name in names}
        graph[module] = {target for target in targets if target in found} - {module}
    return graph


def violations(root=ROOT):
    """Returns one line for every import that ``ALLOWED`` does not allow."""
    lines = []
    for module, names in imports(root).items():
        if module in COLLECTORS:
            continue
        area = area_of(module)
        if area is None:
            lines.append(f"{module} is in no area")
            continue
        for name in sorted(names):
            target = area_of(name)
            if target != area and target not in ALLOWED[area]:
                lines.append(f"{module} imports {name}")
    return lines


def circles(graph):
    """Returns the groups of modules that import each other in a circle (Tarjan's algorithm)."""
    index = {}
    low = {}
    stack = []
    found = []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found
