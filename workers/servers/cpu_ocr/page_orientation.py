"""Reads a page that may lie on its side or upside down, with no model for it. Used by api.

The rule and its thresholds were chosen on 83 turned and upright real pages: text in tall boxes
lies on its side; a turn the recogniser cannot make good for itself shows as low confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.servers.cpu_ocr.ocr_engine import TextBox, TextRecogniser
from workers.servers.cpu_ocr.request_picture import turned
from workers.servers.cpu_ocr.text_order import MIN_CONFIDENCE, is_tall

SURE = 0.8


@dataclass(frozen=True, slots=True)
class OrientedReading:
    """The boxes of a page and the turn, counter-clockwise in degrees, that made it readable."""

    boxes: list[TextBox]
    degrees: int = 0


def read_page(engine: TextRecogniser, picture: bytes) -> OrientedReading:
    """Read a plain picture; one that looks turned is read once more and the better one kept."""
    first = OrientedReading(engine.read(picture))
    degrees = likely_turn(first.boxes)
    if not degrees:
        return first
    second = OrientedReading(engine.read(turned(picture, degrees)), degrees)
    return max(first, second, key=lambda reading: _worth(reading.boxes))


def likely_turn(boxes: Sequence[TextBox]) -> int:
    """0, or the counter-clockwise turn in degrees after which the text should stand upright."""
    length = sum(_length(box) for box in boxes)
    if not length:
        return 0
    tall = sum(_length(box) for box in boxes if is_tall(box)) / length
    sure = sum(_length(box) * box.confidence for box in boxes) / length >= SURE
    if tall > 0.5:
        return 90 if sure else 270
    return 0 if sure else 180


def _length(box: TextBox) -> float:
    return max(box.width, box.height)


def _worth(boxes: Sequence[TextBox]) -> float:
    """Letters read with confidence; those in tall boxes come out in no usable order."""
    return sum(
        len(box.text) * box.confidence
        for box in boxes
        if box.confidence >= MIN_CONFIDENCE and not is_tall(box)
    )
