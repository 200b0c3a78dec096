# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The model zoo's backbones as tags of timm: ``mobile_former_285m.qb_heat_caltech101``.

Importing this module tells timm of them; nothing is fetched before
``timm.create_model(name, pretrained=True)`` asks for it.
"""

import logging
from collections.abc import Iterable

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.classification import TIMM_NAMES, add_timm_weights

from .index import ZooEntry, list_entries

logger = logging.getLogger(__name__)


def timm_name(entry: ZooEntry) -> str:
    """Returns timm's name of an entry's backbone, or "" where it is of none of the three sizes.

    "qb_heat/285M_caltech101" is "mobile_former_285m.qb_heat_caltech101".
    """
    task, _, variant = entry.name.partition("/")
    size, _, rest = variant.partition("_")
    if size not in TIMM_NAMES:
        return ""
    tag = "_".join(filter(None, [task, rest])).lower()
    return f"{TIMM_NAMES[size]}.{tag.replace('/', '_').replace('.', '_')}"


def add_entries(entries: Iterable[ZooEntry]) -> None:
    """Tells timm of all entries on a Mobile-Former of one of the three sizes, or of none.

    Raises:
        UserError: two entries have one tag, such as those of "x/285M_a.b" and "x/285M_a_b".
    """
    tagged: dict[str, ZooEntry] = {}
    for entry in entries:
        name = timm_name(entry)
        other = tagged.setdefault(name, entry)
        if name and other != entry:
            raise UserError(
                f"'{other.name}' and '{entry.name}' both have timm's tag {name}: give one of them "
                "another name"
            )
    add_timm_weights(
        {
            name: {
                "file": f"qbheat://{entry.name}",
                "custom_load": True,
                "num_classes": 0,
                "license": entry.licence,
                "description": entry.summary,
            }
            for name, entry in tagged.items()
            if name
        }
    )


try:
    add_entries(list_entries())
except UserError as error:  # an index of one's own must not keep the package from being imported
    logger.warning("timm is told of no weights of the model zoo: %s", error)
