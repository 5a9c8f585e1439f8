"""A page's own text as Markdown."""

from __future__ import annotations

from typing import Any

import pymupdf

from rag_service.pdf.child.extraction import extract
from rag_service.pdf.child.page_markdown import to_markdown
from tests.fakes import pdf_samples as samples


class PageWriter:
    """A page to write on."""

    def __init__(self, width: float = 600, height: float = 800) -> None:
        self.document = pymupdf.open()
        self.page: Any = self.document.new_page(width=width, height=height)

    def line(self, x: float, y: float, words: str, size: float = 11, font: str = "helv") -> None:
        self.page.insert_text((x, y), words, fontsize=size, fontname=font)

    def lines(self, x: float, y: float, *words: str, **style: Any) -> None:
        for number, each in enumerate(words):
            self.line(x, y + 14 * number, each, **style)

    def box(self, area: Any, words: str = samples.PROSE, **style: Any) -> None:
        self.page.insert_textbox(area, words, **style)

    def grid(self, xs: list[float], ys: list[float]) -> None:
        for x in xs:
            self.page.draw_line((x, ys[0]), (x, ys[-1]))
        for y in ys:
            self.page.draw_line((xs[0], y), (xs[-1], y))

    def markdown(self) -> str:
        copy = pymupdf.open(stream=self.document.tobytes(), filetype="pdf")
        return to_markdown(extract(copy[0]))


def test_a_paragraph_is_one_line() -> None:
    writer = PageWriter()
    writer.box((60, 60, 540, 200))
    assert writer.markdown() == samples.PROSE


def test_words_broken_at_the_end_of_a_line_are_whole_again() -> None:
    writer = PageWriter()
    writer.lines(
        60, 80, "The whole of this para-", "graph speaks of a well-", "Known house on the hill."
    )
    assert (
        writer.markdown()
        == "The whole of this paragraph speaks of a well- Known house on the hill."
    )


def test_lines_of_cjk_text_are_joined_without_a_space() -> None:
    writer = PageWriter()
    first, second = "我们在这个地方住了很多年后来因为工作的关", "系全家人都到了另外一个大城市生活"
    writer.lines(60, 80, first, second, font="china-s")
    writer.lines(60, 300, "王小明", "李大海", font="china-s")
    assert writer.markdown().split("\n\n") == [first + second, "王小明 李大海"]


def test_intended_line_breaks_are_kept() -> None:
    writer = PageWriter()
    writer.lines(
        60, 80, "To the office of the town", "Room 4", "12345 Old Town on the hill by the river"
    )
    assert (
        writer.markdown()
        == "To the office of the town\nRoom 4\n12345 Old Town on the hill by the river"
    )


def test_a_table_of_contents_keeps_its_entries() -> None:
    writer = PageWriter()
    writer.lines(60, 80, "The first chapter . . . . . . . . . 7", "The second one..............12")
    assert writer.markdown() == "The first chapter … 7\nThe second one … 12"


def test_large_and_bold_lines_are_headings() -> None:
    writer = PageWriter()
    writer.line(60, 80, "The Name of the Report", size=24)
    writer.line(60, 130, "A chapter of it", size=16)
    writer.line(60, 170, "A part of the chapter", font="hebo")
    writer.box((60, 190, 540, 300))
    assert writer.markdown().split("\n\n") == [
        "# The Name of the Report", "## A chapter of it", "### A part of the chapter",
        samples.PROSE,
    ]  # fmt: skip


def test_a_bold_paragraph_is_not_a_heading() -> None:
    writer = PageWriter()
    writer.box((60, 60, 540, 200), fontname="hebo")
    writer.box((60, 250, 540, 400), samples.PROSE + " " + samples.PROSE)
    assert "#" not in writer.markdown()


def test_lists_keep_their_items() -> None:
    writer = PageWriter()
    writer.lines(
        60, 80, "• the first thing of all", "• the second, which is", "   longer than a line"
    )
    writer.lines(60, 200, "1. take the key", "2. open the door")
    assert writer.markdown().split("\n\n") == [
        "- the first thing of all\n- the second, which is longer than a line",
        "1. take the key\n2. open the door",
    ]


def test_code_keeps_its_lines_and_indents() -> None:
    writer = PageWriter()
    writer.lines(60, 80, "def twice(x):", "    return 2 * x", font="cour")
    writer.box((60, 200, 540, 400))
    assert writer.markdown().split("\n\n")[0] == "```\ndef twice(x):\n    return 2 * x\n```"


def test_text_that_looks_like_markup_stays_text() -> None:
    writer = PageWriter()
    writer.line(60, 80, "# not a heading of this page")
    assert writer.markdown() == "\\# not a heading of this page"


def test_two_columns_are_read_one_after_the_other() -> None:
    writer = PageWriter()
    for number in range(8):
        for x, side in ((50, "left"), (320, "right")):
            writer.line(x, 100 + 20 * number, f"row {number} of the {side} column of text")
    text = writer.markdown()
    assert text.index("row 7 of the left") < text.index("row 0 of the right")


def test_a_ruled_table_becomes_a_table_in_its_place() -> None:
    writer = PageWriter()
    writer.box((60, 60, 540, 120), "Before the table. " + samples.PROSE)
    xs, ys = [60.0, 200.0, 300.0, 400.0], [200.0, 220.0, 240.0, 260.0]
    writer.grid(xs, ys)
    rows = [["Name", "Size", "Price"], ["nail", "3 cm", "2 | 3"], ["", "4 cm", "5"]]
    for y, row in zip(ys, rows, strict=False):
        for x, cell in zip(xs, row, strict=False):
            writer.line(x + 4, y + 14, cell)
    writer.box((60, 300, 540, 400), "After the table. " + samples.PROSE)
    before, table, after = writer.markdown().split("\n\n")
    assert before.startswith("Before the table.")
    assert table.splitlines() == [
        "| Name | Size | Price |",
        "| --- | --- | --- |",
        "| nail | 3 cm | 2 \\| 3 |",
        "|  | 4 cm | 5 |",
    ]
    assert after.startswith("After the table.")


def test_cells_within_one_line_of_text_are_separated() -> None:
    writer = PageWriter()
    xs, ys = [60.0, 92.0, 124.0, 156.0], [200.0, 220.0, 240.0, 260.0]
    writer.grid(xs, ys)
    for y, row in zip(ys, ("aaaa bbbb cccc", "dddd eeee ffff", "gggg hhhh iiii"), strict=False):
        writer.line(62, y + 14, row.replace(" ", "  "))
    assert "| aaaa | bbbb | cccc |" in writer.markdown()


def test_cells_drawn_as_boxes_are_a_table() -> None:
    writer = PageWriter()
    for row in range(3):
        for column in range(3):
            x, y = 60 + 100 * column, 100 + 20 * row
            writer.page.draw_rect((x, y, x + 100, y + 20))
            writer.line(x + 4, y + 14, f"cell {row}{column}")
    assert writer.markdown().splitlines()[2:] == [
        "| cell 10 | cell 11 | cell 12 |",
        "| cell 20 | cell 21 | cell 22 |",
    ]


def test_rules_without_columns_and_grids_without_text_are_not_tables() -> None:
    writer = PageWriter()
    for y in range(300, 500, 20):
        writer.page.draw_line((60, y), (540, y))
    writer.grid([60.0, 100.0, 140.0, 180.0], [600.0, 620.0, 640.0, 660.0])
    writer.box((60, 60, 540, 200))
    assert writer.markdown() == samples.PROSE


def test_a_frame_around_the_page_is_not_a_table() -> None:
    writer = PageWriter()
    writer.page.draw_rect((5, 5, 595, 795))
    for y in (200, 400, 600):
        writer.page.draw_line((5, y), (595, y))
    for y in (60, 220, 420, 620):
        writer.box((60, y, 540, y + 100))
    assert "|" not in writer.markdown()


def test_a_turned_page_is_read_as_it_is_shown() -> None:
    writer = PageWriter(width=800, height=600)
    writer.page.set_rotation(90)
    for number in range(4):
        shown = pymupdf.Point(60, 100 + 20 * number) * writer.page.derotation_matrix
        writer.page.insert_text(shown, f"line {number} of the turned page", rotate=90)
    text = writer.markdown()
    assert [text.index(f"line {number}") for number in range(4)] == sorted(
        text.index(f"line {number}") for number in range(4)
    )
