"""Which pages are read turned as well, and which reading is kept."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from workers.servers.cpu_ocr.ocr_engine import TextBox
from workers.servers.cpu_ocr.page_orientation import likely_turn, read_page


def wide(confidence: float) -> list[TextBox]:
    return [TextBox(0, 0, 300, 20, "some words in a row", confidence)]


def tall(confidence: float) -> list[TextBox]:
    return [TextBox(0, 0, 20, 300, "some words in a row", confidence)]


@pytest.mark.parametrize(
    ("boxes", "degrees"),
    [(wide(0.95), 0), (wide(0.6), 180), (tall(0.95), 90), (tall(0.6), 270), ([], 0)],
)
def test_the_rule(boxes: list[TextBox], degrees: int) -> None:
    assert likely_turn(boxes) == degrees


def test_a_single_narrow_letter_does_not_mean_a_turn() -> None:
    assert likely_turn([TextBox(0, 0, 8, 24, "1", 0.95)]) == 0


class Scripted:
    """Answers by the shape of the picture, and records the shapes."""

    def __init__(self, *answers: list[TextBox]) -> None:
        self.answers = list(answers)
        self.sizes: list[tuple[int, int]] = []

    def read(self, picture: bytes) -> list[TextBox]:
        self.sizes.append(Image.open(io.BytesIO(picture)).size)
        return self.answers.pop(0)


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40)).save(buffer, "PNG")
    return buffer.getvalue()


def test_an_upright_page_is_read_once() -> None:
    engine = Scripted(wide(0.95))
    assert read_page(engine, png()).degrees == 0
    assert engine.sizes == [(60, 40)]


def test_a_sideways_page_is_turned_and_the_better_reading_kept() -> None:
    engine = Scripted(tall(0.9), wide(0.97))
    page = read_page(engine, png())
    assert (page.degrees, page.boxes) == (90, wide(0.97))
    assert engine.sizes == [(60, 40), (40, 60)]


def test_a_turn_that_reads_worse_is_not_kept() -> None:
    page = read_page(Scripted(wide(0.7), wide(0.55)), png())
    assert (page.degrees, page.boxes) == (0, wide(0.7))
