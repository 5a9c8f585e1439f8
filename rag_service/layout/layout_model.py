"""What a layout model is: the protocol, its error, its threads. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rag_service.config.options import LayoutOptions
from rag_service.layout.page_layout import LayoutBox

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]


class BadPicture(Exception):
    """The bytes are not a readable picture."""


class LayoutModel(Protocol):
    """Finds the boxes of pages. One copy serves a node."""

    name: str
    # Pictures that one call of find() can use.
    most: int

    def read(self, jpeg: bytes) -> Pixels:
        """Return the picture as the model needs it: height x width x 3, RGB. Raises BadPicture."""

    def find(self, pictures: Sequence[Pixels]) -> list[list[LayoutBox]]:
        """Return each picture's boxes in reading order. Called from one thread at a time."""


def thread_count(settings: LayoutOptions) -> int:
    """Threads for the model: the setting, or one for each core that this process may use."""
    return settings.threads or len(os.sched_getaffinity(0))
