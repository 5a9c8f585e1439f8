"""Reads a page that may be sideways or upside down, without a model for orientation.

The rule and its thresholds were chosen on 83 turned and upright real pages: text in tall boxes is
sideways; low confidence means a turn that the recogniser cannot correct on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.servers.cpu_ocr.ocr_engine import TextBox, TextRecogniser
from workers.servers.cpu_ocr.request_picture import turned
from workers.servers.cpu_ocr.text_order import MIN_CONFIDENCE, is_tall

# The mean confidence from which the text counts as readable.
READABLE = 0.8


@dataclass(frozen=True, slots=True)
class OrientedReading:
    """The boxes of a page, and the degrees by which it was turned counter-clockwise."""

    boxes: list[TextBox]
    degrees: int = 0


def read_page(engine: TextRecogniser, picture: bytes) -> OrientedReading:
    """Read a plain picture; if it looks turned, also read it turned, and return the better one."""
    first = OrientedReading(engine.read(picture))
    degrees = likely_turn(first.boxes)
    if not degrees:
        return first
    second = OrientedReading(engine.read(turned(picture, degrees)), degrees)
    return max(first, second, key=lambda reading: _worth(reading.boxes))


def likely_turn(boxes: Sequence[TextBox]) -> int:
    """Return the counter-clockwise degrees after which the text is probably upright, or 0."""
    length = sum(_length(box) for box in boxes)
    if not length:
        return 0
    tall = sum(_length(box) for box in boxes if is_tall(box)) / length
    readable = sum(_length(box) * box.confidence for box in boxes) / length >= READABLE
    if tall > 0.5:
        return 90 if readable else 270
    return 0 if readable else 180


def _length(box: TextBox) -> float:
    return max(box.width, box.height)


def _worth(boxes: Sequence[TextBox]) -> float:
    """Return the number of letters, weighted by confidence; tall boxes have no usable order."""
    return sum(
        len(box.text) * box.confidence
        for box in boxes
        if box.confidence >= MIN_CONFIDENCE and not is_tall(box)
    )
