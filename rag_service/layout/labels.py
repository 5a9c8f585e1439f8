"""The labels of blocks, and what is done with each."""

from __future__ import annotations

from rag_service.config.options import LayoutOptions
from rag_service.layout.page_layout import Task
from rag_service.states import LAYOUT_LABELS

# In the order of PP-DocLayoutV3's configuration.
LABELS = LAYOUT_LABELS


def task_of(label: str, settings: LayoutOptions) -> Task:
    """Return what is done with a block of this label; a label in no setting is read as text."""
    if label in settings.table:
        return Task.TABLE
    if label in settings.formula:
        return Task.FORMULA
    if label in settings.picture:
        return Task.PICTURE
    if label in settings.drop:
        return Task.DROP
    return Task.TEXT
