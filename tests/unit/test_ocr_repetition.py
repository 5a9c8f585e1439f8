"""Loops are removed, and text that only looks like a loop is kept."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rag_service.ocr.cleanup.repetition import WithoutLoops, cut_loop

BEFORE = "The committee met on Tuesday and approved the minutes.\n"
PARAGRAPH = (
    "Where a tenant leaves before the agreed term, the landlord may keep the deposit unless both "
    "sides sign a note that releases it; damage found later is settled by the arbitrator, whose "
    "finding binds everybody for twelve months and whose fee is shared in equal halves.\n\n"
)
PIECES = st.sampled_from(
    ["a", "0", ".", " ", "\n", "0.00 ", "Yes\n", "the cat sat ", "<td></td>", "ab" * 40, "漢字"]
) | st.sampled_from(
    ["<tr><td>0.00</td></tr>", "| a |\n", "_", "```\n", "All work and no play. ", "\ud800"]
)
REPETITIVE = st.lists(
    st.tuples(PIECES | st.text(max_size=8), st.integers(1, 9) | st.sampled_from([40, 130, 350])),
    max_size=6,
).map(lambda parts: "".join(piece * times for piece, times in parts))
ANY_TEXT = REPETITIVE | st.text(st.characters(), max_size=80)


def rows(times, *cells):
    return ("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>") * times


def poem(refrain, stanzas):
    lines = "Again the wind came down the valley, number {0},\nand shook the shutters {0} times.\n"
    return "\n".join(lines.format(number) + refrain for number in range(stanzas))


REAL = {
    "leaders of a table of contents": "".join(
        f"Chapter {n} {'.' * (170 - n)} {n * 7}\n" for n in range(1, 45)
    ),
    "leaders of a page without its lines": ". " * 400,
    "leaders with spaces": "".join(f"Part {n} {'. ' * 60} {n}\n" for n in range(1, 30)),
    "lines to write on": "Remarks:\n" + ("_" * 90 + "\n") * 45,
    "a list to sign": "Present\n" + "Name ____________ Signature ____________ Date ______\n" * 45,
    "boxes to tick": "[ ] Yes [ ] No\n" * 60,
    "a table of zeros": "<table>" + rows(70, "0.00", "0.00", "0.00", "0.00") + "</table>",
    "an empty table": "<table>" + rows(60, "", "", "", "") + "</table>",
    "an empty calendar": "<table>" + rows(30, *[""] * 31) + "</table>",
    "rows of one phrase": "<table>" + rows(40, "Not applicable", "Not applicable") + "</table>",
    "a table in pipes": "| Item | Price |\n|---|---|\n" + "| | |\n" * 60,
    "a column of zeros": "0.00\n" * 90,
    "a column of answers": "Yes\n" * 80,
    "zeros in one line": " ".join(["0"] * 250),
    "a matrix": "\\begin{array}" + ("0 & " * 19 + "0 \\\\ ") * 20 + "\\end{array}",
    "a refrain": poem("Nevermore, nevermore!\n", 30),
    "a sung line": "Let it be, let it be, let it be, let it be\n" * 6,
    "na na na": "Na na na nananana, nananana, hey Jude\n" * 12,
    "four coupons": "One free coffee at the counter on any working day before noon.\n\n" * 8,
    "one form twice on a sheet": "".join(f"{n}. Question {n * n}\n" for n in range(80)) * 2,
    "an empty table, a tag a line": "<table>\n" + "<tr>\n<td></td>\n</tr>\n" * 70 + "</table>",
    "closing braces": "        }\n" * 40,
    "rules": "-" * 200 + "\ntext\n" + "=" * 200,
    "blank lines": "a" + "\n" * 60 + "b",
    "a placeholder": "X" * 90,
    "laughter": "哈" * 60,
}

LOOPS = {
    "a line": ("The total is due within thirty days of the invoice.\n", 40),
    "a phrase": ("the cat sat on the mat ", 60),
    "a word": ("word ", 300),
    "a sign": ("x", 400),
    "a number": ("0.00 ", 700),
    "leaders without end": (".", 3000),
    "lines to write on without end": ("_" * 70 + "\n", 200),
    "a row": (rows(1, "Flour", "2 kg", "1.20"), 130),
    "an empty row": (rows(1, "", ""), 300),
    "cells without end": ("<td></td>", 400),
    "a row in pipes": ("| a | b |\n", 200),
    "lines of a poster": ("YOU DIDN'T COME THIS\nFAR TO ONLY COME\nTHIS FAR\n", 30),
    "rows of a table": (
        rows(1, "Benzofuran", "271-89-6") + rows(1, "Benzophenone", "119-61-9"),
        70,
    ),
    "a paragraph": (PARAGRAPH, 7),
    "Chinese": ("我们在这里很久。", 40),
    "fences": ("```\n", 300),
    "tags without sense": ('<!-- Lead --tr id="a">Lead oxide</td><tr><strong>CAS</h4></br>', 70),
    "letters cut in two": ("\ufffd\ud800", 600),
}


FILLING = (".", "\ufffd\ud800")
AFTER = "The meeting was closed at four o'clock."
# Loops only at the end of an answer that was cut by its limit.
SHORT_LOOPS = {
    "a line": ("The total is due within thirty days of the invoice.\n", 5),
    "a phrase": ("the cat sat on the mat ", 7),
    "a word": ("word ", 25),
    "a number": ("0.00 ", 70),
    "a row": (rows(1, "Flour", "2 kg", "1.20"), 15),
    "an empty row": (rows(1, "", ""), 40),
    "a sign": ("x", 120),
    "a poster": ("YOU DIDN'T COME THIS\nFAR TO ONLY COME\nTHIS FAR\n", 6),
}


def cases(named):
    return pytest.mark.parametrize(("unit", "times"), named.values(), ids=named.keys())


@pytest.mark.parametrize("text", REAL.values(), ids=REAL.keys())
def test_real_pages_are_unchanged(text):
    for page in (text, BEFORE + text + AFTER):
        assert cut_loop(page) == WithoutLoops(page, False)


@cases(LOOPS)
def test_one_copy_of_a_loop_and_what_follows_it_are_kept(unit, times):
    cut = cut_loop(BEFORE + unit * times + AFTER)
    few = -(-3 // len(unit)) if unit in FILLING else 1
    assert cut == WithoutLoops(BEFORE + unit * few + AFTER, True)


@cases(LOOPS)
def test_a_broken_last_copy_at_the_end_is_removed_too(unit, times):
    cut = cut_loop(BEFORE + unit * times + unit[: len(unit) * 2 // 3])
    assert cut.looped
    assert cut.text.startswith(BEFORE + unit.rstrip())
    assert len(cut.text) < len(BEFORE) + 2 * len(unit) + 3


@cases(SHORT_LOOPS)
def test_a_cut_answer_needs_fewer_copies(unit, times):
    text = BEFORE + unit * times
    assert not cut_loop(text).looped
    assert not cut_loop(text + AFTER, unfinished=True).looped
    cut = cut_loop(text, unfinished=True)
    assert cut.looped
    assert cut.text.rstrip() == BEFORE + unit.rstrip()


def test_a_row_is_kept_whole_after_other_rows():
    table = "<table>" + rows(1, "Item", "Price")
    assert cut_loop(table + rows(200, "Flour", "1.20") + "<tr><td>Fl").text == (
        table + rows(1, "Flour", "1.20")
    )


def test_a_sentence_separated_by_spaces_is_kept_once():
    cut = cut_loop("The cat sat. " * 60 + "The c", unfinished=True)
    assert cut.text == "The cat sat."


def test_a_loop_is_found_before_a_character_cut_in_two():
    text = BEFORE + "我们在这个地方住了很多年。" * 9 + "我们\ufffd"
    assert cut_loop(text, unfinished=True).text == BEFORE + "我们在这个地方住了很多年。"


def test_loops_within_a_larger_loop_are_cut_too():
    sentence = "The total is due within thirty days of the invoice.\n"
    text = cut_loop(BEFORE + ("word " * 150 + sentence) * 40).text
    assert text == BEFORE + "word " + sentence


def test_a_loop_whose_copy_contains_each_line_twice_is_found():
    lines = ("The wind came down", "and shook", "the house")
    one, two, three = (f"{line:<31}\n" for line in lines)
    verse = one + two + one + three + two + three
    assert cut_loop(verse * 25) == WithoutLoops(verse, True)


def test_two_loops_in_one_text():
    text = BEFORE + "word " * 200 + AFTER + "\n" + "Yes\n" * 200
    assert cut_loop(text).text == BEFORE + "word " + AFTER + "\nYes\n"


@given(ANY_TEXT, st.booleans())
@example("", False)
@example("\ud800" * 500, True)
def test_a_cut_only_removes_text(text, unfinished):
    cut = cut_loop(text, unfinished=unfinished)
    rest = iter(text)
    assert all(character in rest for character in cut.text)
    assert cut.looped == (cut.text != text)


@given(ANY_TEXT, st.booleans())
def test_a_second_cut_finds_nothing(text, unfinished):
    once = cut_loop(text, unfinished=unfinished).text
    assert cut_loop(once, unfinished=unfinished) == WithoutLoops(once, False)


@given(ANY_TEXT)
def test_what_is_a_loop_in_a_whole_answer_is_one_in_a_cut_answer(text):
    assert cut_loop(text, unfinished=True).looped or not cut_loop(text).looped


@given(st.text("abc \n", max_size=300).filter(str.strip), st.integers(400, 500))
def test_any_text_repeated_many_times_is_a_loop(unit, times):
    cut = cut_loop(unit * times)
    assert cut.looped
    assert len(cut.text) <= 2 * len(unit) + 3


def megabyte(name):
    dice = random.Random(name)
    return {
        "random": lambda: "".join(dice.choices("abcdefgh <td>\n", k=1_000_000)),
        "two letters": lambda: "".join(dice.choices("ab", k=1_000_000)),
        "spaces": lambda: " " * 1_000_000,
        "rows that differ a little": lambda: "".join(rows(1, n, "", "", "") for n in range(22_000)),
        "runs of one letter": lambda: "".join(
            "a" * dice.randint(20, 60) + "b" for _ in range(24_000)
        ),
        "nested": lambda: (("ab" * 90 + "c") * 40 + "d\n") * 140,
    }[name]()


@pytest.mark.parametrize(
    "name",
    [
        "random",
        "two letters",
        "spaces",
        "rows that differ a little",
        "runs of one letter",
        "nested",
    ],
)
def test_a_megabyte_is_handled(name):
    text = megabyte(name)
    cut = cut_loop(text, unfinished=True)
    assert cut.looped == (name in {"spaces", "nested"})
