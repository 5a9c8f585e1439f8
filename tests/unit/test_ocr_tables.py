"""Tables from models: correct ones are unchanged, broken ones become valid and lose no word."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rag_service.ocr.cleanup.html_tables import repair

PARENTS = {
    "table": {"td", "th", "caption", None},
    "caption": {"table"},
    "thead": {"table"},
    "tbody": {"table"},
    "tfoot": {"table"},
    "tr": {"table", "thead", "tbody", "tfoot"},
    "td": {"tr"},
    "th": {"tr"},
}


class StrictParser(HTMLParser):
    """Reads strictly: a tag out of place or without its end is an error. `cells` hold the texts.

    Outside tables, anything is allowed.
    """

    def __init__(self, html):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(html)
        self.close()
        assert not self.open, f"{self.open} are not closed in {html!r}"

    def handle_starttag(self, tag, attrs):
        if tag not in PARENTS:
            assert not self.open, f"<{tag}> in a table"
            return
        assert (self.open[-1] if self.open else None) in PARENTS[tag], (tag, self.open)
        self.open.append(tag)
        if tag in {"td", "th", "caption"}:
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag in PARENTS or self.open:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in {"td", "th", "caption"}:
            self.cells[-1] += data
        else:
            assert not self.open or not data.strip(), f"{data!r} stands outside of cells"


def cells_of(html):
    return StrictParser(html).cells


WHOLE = [
    "<table><tr><td>a</td><td>b</td></tr></table>",
    '<table border="1">\n <tr>\n  <th colspan="2">Sum &amp; rest</th>\n </tr>\n</table>',
    '<table class="table table-bordered"><thead><tr><th>x</th></tr></thead>'
    "<tbody><tr><td>p < 0.05</td></tr></tbody></table>",
    "<table><caption>Rents</caption><tr><td rowspan='2'>a\nb</td></tr></table>",
    "Before\n\n<table><tr><td>$a < b$</td></tr></table>\n\nBetween < >\n\n"
    "<table><tr><td></td></tr></table>\n\n# After",
    "<table><tr><td><table><tr><td>in</td></tr></table></td><td>out</td></tr></table>",
    "<TABLE><TR><TD>a</TD></TR></TABLE>",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "if a <b and c> d: <b>bold</b> <div> <title> <!-- x -->",
    "```html\n<table><td>\n```\n\nThat makes a table.",
]


@pytest.mark.parametrize("text", WHOLE)
def test_correct_tables_and_text_without_tables_are_unchanged(text):
    assert repair(text) == text


@pytest.mark.parametrize(
    ("broken", "rows"),
    [
        ("<table><tr><td>a</td><td>b", ["a|b"]),
        ("<table><tr><td>a</td><t", ["a"]),
        ('<table><tr><td>a</td><td colspan="2', ["a"]),
        ("<table><tr><td>a<td>b<tr><td>c", ["a|b", "c"]),
        ("<table><tr><td>a</td>b</td></tr></table>", ["a|b"]),
        ("<table><tr><td>a</th></tr></table>", ["a"]),
        ("<table><td>a</td></table>", ["a"]),
        ("<tr><td>a</td></tr>", ["a"]),
        ("<td>a</td><td>b</td>", ["a|b"]),
        ("<table><tr><td>a</td></tr></table></table></td>", ["a"]),
        ("<table><table><tr><td>a</td></tr></table>", ["a"]),
        ("<table>Rents<tr><td>a</td></tr></table>", ["Rents", "a"]),
        ("<table><tr><td>a</td></tr>in EUR</table>", ["a", "in EUR"]),
        ("<table><tr><td/>a</td></tr></table>", ["|a"]),
    ],
)
def test_broken_tables_are_repaired(broken, rows):
    lines = ("<tr><td>" + row.replace("|", "</td><td>") + "</td></tr>" for row in rows)
    assert repair(broken) == f"<table>{''.join(lines)}</table>"


def test_text_after_an_unclosed_table_is_not_a_cell():
    table = "<table><tr><td>a</td></tr>"
    assert repair(f"{table}\n\n# Next\n\nText") == f"{table}</table>\n\n# Next\n\nText"
    assert repair(f"{table[:-5]}\n\n# Next") == f"{table}</table>\n\n# Next"


def test_two_tables_stay_two_if_the_first_is_unclosed():
    one = "<table><tr><td>a</td></tr>"
    assert repair(f"{one}\n\n{one}</table>") == f"{one}</table>\n\n{one}</table>"
    text = f"{one[:-10]}\n\nText\n\n{one}</table>"
    assert repair(text) == f"{one}</table>\n\nText\n\n{one}</table>"


@pytest.mark.parametrize("before", ["a <b", "</", "<!-- ", "<script>", "<t <u", "<table", "</td>"])
def test_no_markup_before_a_table_hides_it(before):
    assert cells_of(repair(f"Text {before}<table><tr><td>a</td></tr></table>")) == ["a"]


def test_a_table_without_cells_is_dropped_or_becomes_text():
    assert (
        repair("<table></table>")
        == repair("<table><tr>")
        == repair("<table>\n<tr></tr></table>")
        == ""
    )
    assert repair("The <table> tag.") == "The &lt;table> tag."
    assert repair("A <td> holds text.") == "A &lt;td> holds text."
    assert repair("DROP <table name>; <!--") == "DROP &lt;table name>; &lt;!--"
    assert repair('<table id="x"> is a tag') == '&lt;table id="x"> is a tag'


def test_only_tags_of_tables_stay_tags_in_a_cell():
    cell = "<b>5</b> m<sup>2</sup><br/>H<sub>2</sub>O <script>x</script>"
    repaired = repair(f"<table><tr><td>{cell}</td></tr></table>")
    assert cells_of(repaired) == ["5 m^2 H_2O <script>x</script>"]


def test_removing_a_tag_creates_no_new_tag():
    text = "<table><tr><td><<b>td>a<</tbody>/tr></td></tr></table>"
    assert cells_of(repair(text)) == ["<td>a</tr>"]


def test_attributes_that_are_not_for_tables_are_removed():
    row = '<tr style="color:red"><td rowspan=9999 colspan=2>a</td></tr>'
    assert repair(f"<table onclick='x()' border=1>{row}</table>") == (
        "<table border=1><tr><td colspan=2>a</td></tr></table>"
    )


WORDS = st.text("abcdefghij", min_size=3, max_size=5)
# What a model may write in a cell; no tag, and nothing that HTML reads as one sign.
CELL = st.lists(
    WORDS | st.sampled_from(["<", ">", "a<b", "5 <6", "R&D", "$x<y$", "|", "漢", "\ud800"]),
    max_size=4,
).map(" ".join)
TABLES = st.lists(st.lists(CELL, min_size=1, max_size=4), min_size=1, max_size=5)


def written(table, rows=True, cells=True, end=True):
    row_end, cell_end = "</tr>" * rows, "</td>" * cells
    lines = ("<tr>" + "".join(f"<td>{cell}{cell_end}" for cell in row) + row_end for row in table)
    return "<table>" + "".join(lines) + "</table>" * end


@given(TABLES)
def test_every_cell_keeps_its_text(table):
    cells = [cell for row in table for cell in row]
    assert cells_of(repair(written(table))) == cells


@given(TABLES, st.booleans(), st.booleans(), st.booleans())
def test_missing_end_tags_change_no_cell(table, rows, cells, end):
    # At the very end, "<" is the beginning of a tag that was cut.
    assume(not table[-1][-1].endswith("<"))
    assert repair(written(table, rows, cells, end)) == repair(written(table))


TAGS = ["</td>", "</tr>", "<td>", "<tr>", "</table>", "</tbody>", "<b>", "<br>", "<th>", "<table>"]


@given(st.lists(WORDS | st.sampled_from(TAGS), max_size=30))
def test_no_word_is_lost_whatever_tags_are_missing_or_added(pieces):
    repaired = repair("<table><tr><td>x" + "".join(pieces))
    StrictParser(repaired)
    bare = re.sub("<[^<>]*>|&lt;/?[a-z]+>", "", repaired)
    assert "".join(bare.split()) == "x" + "".join(each for each in pieces if each not in TAGS)


FRAGMENTS = [
    "<table>",
    "</table>",
    "<tr>",
    "</tr>",
    "<td>",
    "</td>",
    "<th>",
    "</th>",
    "<thead>",
    "</thead>",
    "<caption>",
    "</caption>",
    '<td colspan="2">',
    "<td/>",
    "<b>",
    "</b>",
    "<sup>",
    "<br>",
    "<",
    ">",
    "</",
    "<t",
    "td>",
    "Q",
    "1",
    " ",
    "\n\n",
    "\n```\n",
    "&lt;",
    "<table",
    "<!--",
    "\ud800",
]
ANY_TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join) | st.text(
    st.characters(), max_size=40
)


@given(ANY_TEXT)
@example("<table><tr><td>a" * 5)
@example("<ta</td>ble>")
@example("<table>\n\n<sup></thead><table><caption>")
@example("<table><td>a\n\nb</tr><table><td>c")
def test_a_second_repair_changes_nothing(text):
    once = repair(text)
    assert repair(once) == once


# In Markdown, tags in a listing are text, and no tag continues after a blank line.
@given(ANY_TEXT.filter(lambda text: not re.search("```|<[^<>]*\n\n", text)))
def test_a_table_from_any_text_is_valid(text):
    StrictParser(repair(f"<table><tr><td>x{text}"))


@given(ANY_TEXT.filter(lambda text: not re.search("<ta?b?l?e?d? |<t[Q1]", text)))
def test_no_letter_is_lost(text):
    def letters(words):
        return [character for character in words if character in "Q1\ud800"]

    assert letters(repair(text)) == letters(text)


@pytest.mark.parametrize(
    "piece", ["<table><tr><td>", "<td>a", "</td>", "<", "<b a=1 ", "```\n", "<table><td>a\n\nb"]
)
def test_a_megabyte_of_one_piece_is_handled(piece):
    times = 1_000_000 // len(piece)
    repaired = repair(f"<table><tr><td>{piece * times}")
    assert repaired.count("<td>") == repaired.count("</td>") >= 1
