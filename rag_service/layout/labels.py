"""What blocks are called and what is done with each. Used by the models and the parsers."""

from __future__ import annotations

from rag_service.config.options import LayoutOptions
from rag_service.layout.page_layout import Task
from rag_service.states import LAYOUT_LABELS

# In the order of their numbers in PP-DocLayoutV3's configuration.
LABELS = LAYOUT_LABELS


def task_of(label: str, settings: LayoutOptions) -> Task:
    """What is done with a block of this label; one that no setting names is read as text."""
    if label in settings.table:
        return Task.TABLE
    if label in settings.formula:
        return Task.FORMULA
    if label in settings.picture:
        return Task.PICTURE
    if label in settings.drop:
        return Task.DROP
    return Task.TEXT
