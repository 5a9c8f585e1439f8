"""A region's Markdown, compared with that of glmocr 0.1.5 for the same answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.layout.page_layout import Task
from rag_service.parsers.block_markdown import (
    PROMPTS,
    content_for,
    join_blocks,
    page_markdown,
    whole_page,
)
from rag_service.parsers.contract import Region

TABLE = '<table border="1">\n<tr><td>Rent</td><td>12.00</td></tr>\n</table>'


def task_for(label):
    tasks = {"table": Task.TABLE, "display_formula": Task.FORMULA, "inline_formula": Task.FORMULA}
    return {**tasks, "image": Task.PICTURE, "chart": Task.PICTURE}.get(label, Task.TEXT)


def region(label, answer, bbox=(100, 100, 900, 200), index=0):
    return Region(index, label, bbox, content_for(label, task_for(label), answer))


def placed(index, label, answer, left=100):
    return region(label, answer, (left, 10 * index, 900, 10 * index + 9), index)


def page(*answers):
    """The Markdown of a page from (label, answer), or (label, answer, left edge)."""
    return page_markdown([placed(index, *answer) for index, answer in enumerate(answers)], 3)


def test_every_task_has_the_prompt_that_the_model_knows():
    assert dict(PROMPTS) == {
        Task.TEXT: "Text Recognition:",
        Task.TABLE: "Table Recognition:",
        Task.FORMULA: "Formula Recognition:",
    }


# The answers, and what ResultFormatter.process of glmocr 0.1.5 made of them when asked.
AS_THE_SDK = [
    ("text", "The lease runs\nfor two years.", "The lease runs\n\nfor two years."),
    ("text", "One\n\nTwo\n\n\nThree", "One\n\nTwo\n\n\nThree"),
    ("text", "· rent", "- rent"),
    ("text", "•  rent", "- rent"),
    ("text", "* rent", "- rent"),
    ("text", "- rent", "- rent"),
    ("text", "1.Rent", "1. Rent"),
    ("text", "a)rent", "a) rent"),
    ("text", "（1）Rent", "(1) Rent"),
    ("text", "(b)Rent", "(b) Rent"),
    ("text", "2）Rent", "2) Rent"),
    ("text", "1.Rent\n2.Term", "1.Rent\n\n2.Term"),
    ("text", "Rent ........ 7", "Rent ... 7"),
    ("text", "Name: ________", "Name: ___"),
    ("text", r"\t\tThe lease\t", "The lease"),
    ("text", "so$ x $is", "so $x$ is"),
    ("text", "where $x^2$, $ y = 3 $.", "where $x^2$, $y = 3$."),
    ("text", "the $ n$th", "the $n$ th"),
    ("abstract", "We show\nthat", "We show\n\nthat"),
    ("algorithm", "for x:\n  y", "for x:\n\n  y"),
    ("seal", "公章", "公章"),
    ("doc_title", "Lease", "# Lease"),
    ("doc_title", "## Lease", "# Lease"),
    ("doc_title", "Lease\nof a house", "# Lease\n\nof a house"),
    ("doc_title", "- Lease", "# - Lease"),
    ("paragraph_title", "Rent", "## Rent"),
    ("paragraph_title", "# Rent", "## Rent"),
    ("paragraph_title", "- Rent", "## Rent"),
    ("paragraph_title", "1.Rent", "## 1.Rent"),
    ("figure_title", "Figure 1: a house", "Figure 1: a house"),
    ("display_formula", "$$ x_1 $$", "$$\nx_1\n$$"),
    ("display_formula", r"\[ x_1 \]", "$$\nx_1\n$$"),
    ("display_formula", r"\(x_1\)", "$$\nx_1\n$$"),
    ("display_formula", "x_1", "$$\nx_1\n$$"),
    ("inline_formula", "x\n= 1", "$$\nx\n= 1\n$$"),
    ("table", TABLE, TABLE),
    ("table", f"  {TABLE}\n", TABLE),
    ("table", "Rent ..... 12.00\nTerm", "Rent ... 12.00\nTerm"),
]


@pytest.mark.parametrize(("label", "answer", "markdown"), AS_THE_SDK)
def test_a_region_reads_as_the_sdk_writes_it(label, answer, markdown):
    assert page((label, answer)) == markdown


# The third column is the SDK's Markdown, which changes what the page says or is broken.
UNLIKE_THE_SDK = [
    ("text", "3.14 is pi", "3. 14 is pi", "3.14 is pi"),
    ("text", "1.2.3 Rent", "1. 2.3 Rent", "1.2.3 Rent"),
    ("text", "U.S. law", "U. S. law", "U.S. law"),
    ("text", "e.g. rent", "e. g. rent", "e.g. rent"),
    ("text", "from $5 to $10 a day", "from $5 to$ 10 a day", "from $5 to $10 a day"),
    ("text", "Rent $ 500 $ 600", "Rent $500$ 600", "Rent $ 500 $ 600"),
    ("text", "from $5 (= €4) to $10", "from $5 (= €4) to$ 10", "from $5 (= €4) to $10"),
    ("text", "A$5 and US$ 7", "A $5 and US$ 7", "A$5 and US$ 7"),
    ("text", "$HOME and $USER", "$HOME and$ USER", "$HOME and $USER"),
    ("text", "A.....1", "A. ..1", "A...1"),
    ("text", r"\theta is small", "heta is small", r"\theta is small"),
    ("text", "```\nx = 1\ny", "```\n\nx = 1\n\ny\n\n```", "```\nx = 1\ny\n```"),
    ("text", "so\n$$\nx\n$$\nthus", "so\n\n$$\n\nx\n\n$$\n\nthus", "so\n\n$$\nx\n$$\n\nthus"),
    ("text", "a\n| b |\n|---|\nc", "a\n\n| b |\n\n|---|\n\nc", "a\n\n| b |\n|---|\n\nc"),
    ("text", TABLE, TABLE.replace("\n", "\n\n"), TABLE),
    ("display_formula", "$x$", "$$\n$x$\n$$", "$$\nx\n$$"),
    ("formula_number", "(1)", "", "(1)"),
    ("table", "<table><tr><td>a", "<table><tr><td>a", "<table><tr><td>a</td></tr></table>"),
]


@pytest.mark.parametrize(("label", "answer", "sdk", "kept"), UNLIKE_THE_SDK)
def test_the_words_are_kept_if_the_sdk_changes_them(label, answer, sdk, kept):
    assert page((label, answer)) == kept != sdk


def test_blocks_are_joined_by_a_blank_line():
    assert page(
        ("doc_title", "Lease"),
        ("text", "The rent is due."),
        ("table", TABLE),
        ("paragraph_title", "Term"),
        ("display_formula", "x = 1"),
    ) == (f"# Lease\n\nThe rent is due.\n\n{TABLE}\n\n## Term\n\n$$\nx = 1\n$$")


@pytest.mark.parametrize("number", ["(1)", "（1）", "1"])
def test_a_formula_takes_its_number(number):
    tagged = "$$\nx_1 \\tag{1}\n$$"
    assert page(("display_formula", "x_1"), ("formula_number", number)) == tagged
    assert page(("formula_number", number), ("display_formula", "x_1")) == tagged


def test_a_number_without_a_formula_is_kept():
    assert page(("formula_number", "(1)"), ("text", "so")) == "(1)\n\nso"
    assert page(("display_formula", r"x \tag{1}"), ("formula_number", "(1)")) == (
        "$$\nx \\tag{1}\n$$\n\n(1)"
    )
    assert page(("display_formula", "x"), ("formula_number", "(1}")) == "$$\nx\n$$\n\n(1}"
    assert page(("display_formula", "x"), ("formula_number", "")).startswith("$$\nx\n$$\n\n![")


def test_a_word_broken_between_blocks_is_whole_again():
    assert page(("text", "The lease con-"), ("text", "tinues")) == "The lease continues"
    assert page(("text", "The lease con-"), ("table", TABLE), ("text", "tinues here")) == (
        f"The lease continues here\n\n{TABLE}"
    )


def test_a_broken_word_may_continue_after_a_caption_and_over_three_blocks():
    texts = [("text", words) for words in ("Die Ver-", "änderung, die un-", "längst")]
    texts.insert(1, ("figure_title", "Bild 1"))
    assert page(*texts) == "Die Veränderung, die unlängst\n\nBild 1"


@pytest.mark.parametrize(
    "blocks",
    [
        [("text", "The lease -"), ("text", "or so")],
        [("text", "The lease con-"), ("text", "Tinued")],
        [("paragraph_title", "Self-"), ("text", "contained")],
        [("text", "Section 1-"), ("text", "a")],
    ],
)
def test_other_hyphens_join_nothing(blocks):
    assert page(*blocks).count("\n\n") == 1


def test_a_text_between_list_items_becomes_an_item():
    assert page(("text", "- rent"), ("text", "term"), ("text", "· deposit")) == (
        "- rent\n\n- term\n\n- deposit"
    )
    assert page(("text", "- rent"), ("text", "term", 150), ("text", "- deposit")) == (
        "- rent\n\nterm\n\n- deposit"
    )
    assert "\n\n![text](" in page(("text", "- rent"), ("text", ""), ("text", "- deposit"))


def test_a_picture_and_a_region_without_text_are_links_to_their_place():
    blocks = [region("image", "", (10, 20, 300, 400)), region("text", " \n", (5, 500, 900, 950))]
    assert page_markdown(blocks, 7) == (
        "![image](pages/7/image?bbox=10,20,300,400)\n\n![text](pages/7/image?bbox=5,500,900,950)"
    )


def test_a_picture_that_is_read_has_its_text():
    assert content_for("image", Task.TEXT, "Exit") == "Exit"
    assert content_for("header", Task.DROP, "Exit") == content_for("image", Task.PICTURE, "x") == ""


def test_a_page_without_regions_is_empty():
    assert page_markdown([], 1) == ""


def test_joined_blocks_keep_label_and_box_and_are_renumbered():
    joined = join_blocks(
        [
            region("text", "con-", (1, 1, 2, 2), 4),
            region("text", "tinued", (3, 3, 4, 4), 7),
            region("formula_number", "(2)", (5, 5, 6, 6), 8),
            region("display_formula", "x", (7, 7, 8, 8), 9),
        ]
    )
    assert joined == [
        Region(0, "text", (1, 1, 2, 2), "continued"),
        Region(1, "display_formula", (7, 7, 8, 8), "$$\nx \\tag{2}\n$$"),
    ]


def test_a_whole_page_is_cleaned_and_its_tables_repaired():
    answer = "# Lease\n\nRent ...... 5\n<table><tr><td>a"
    assert whole_page(answer) == "# Lease\n\nRent ... 5\n<table><tr><td>a</td></tr></table>"


LABELS = st.sampled_from(
    ["text", "doc_title", "paragraph_title", "display_formula", "table", "formula_number", "image"]
)
PIECES = st.sampled_from(
    ["The lease", "con-", "tinued", "\n", "\n\n", " ", "$", "$$", "x_1", "#", "- ", "1.", "(2)"]
) | st.sampled_from([r"\t", "....", "<table>", "<td>", "```", "| a |", r"\[", "5", "\ud800", "漢"])
ANSWERS = st.lists(PIECES, max_size=10).map("".join) | st.text(st.characters(), max_size=40)
REGIONS = st.lists(st.tuples(LABELS, ANSWERS), max_size=8).map(
    lambda pairs: [region(label, answer, index=n) for n, (label, answer) in enumerate(pairs)]
)


def signs(text):
    """The letters, which no rule adds or removes."""
    return [sign for sign in text if sign in "xconiuedTh漢\ud800"]


@given(st.sampled_from(["text", "doc_title", "paragraph_title"]), ANSWERS)
def test_a_text_keeps_its_letters(label, answer):
    assert signs(content_for(label, Task.TEXT, answer)) == signs(answer)


@given(st.sampled_from([Task.TEXT, Task.FORMULA]), LABELS, ANSWERS)
def test_markdown_of_markdown_is_itself(task, label, answer):
    content = content_for(label, task, answer)
    assert content == content.strip()
    assert content_for(label, task, content) == content


@given(REGIONS)
def test_joining_blocks_again_changes_nothing(regions):
    joined = join_blocks(regions)
    assert join_blocks(joined) == joined
    assert page_markdown(joined, 1) == page_markdown(regions, 1)
    assert [block.index for block in joined] == list(range(len(joined)))


@pytest.mark.parametrize(
    "piece", ["$", "$ ", "$a\n", " ", "\n", "a-", ".", "```", "| ", "1.", r"\t"]
)
def test_a_megabyte_of_one_piece_is_handled(piece):
    answer = "a" + piece * (1_000_000 // len(piece)) + "b"
    for task in (Task.TEXT, Task.TABLE, Task.FORMULA):
        assert content_for("text", task, answer).strip("$\n")[0] == "a"
