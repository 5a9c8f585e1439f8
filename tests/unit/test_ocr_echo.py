"""What a model writes around its answer is removed; the text of the page is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.ocr.cleanup.prompt_echo import strip_prompt

PROMPT = "Text Recognition:"
SAID = st.sampled_from(
    [PROMPT, "\n", " ", "```", "```markdown\n", "```python\n", "```\n", "a", "# A\n", "<|user|>"]
) | st.sampled_from(["\ud800", "<|endoftext|>", "Text", "Recognition:", "\t", "\r\n"])
ANSWERS = st.lists(SAID, max_size=14).map("".join) | st.text(st.characters(), max_size=40)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Text Recognition:\nThe lease", "The lease"),
        ("Text Recognition: The lease", "The lease"),
        ("The lease\n\nText Recognition:\n", "The lease"),
        ("Text Recognition:\nText Recognition:\nThe lease", "The lease"),
        ("```markdown\n# Lease\n\nRent\n```", "# Lease\n\nRent"),
        (
            "```html\n<table><tr><td>1</td></tr></table>\n```\n",
            "<table><tr><td>1</td></tr></table>",
        ),
        ("```markdown\n# Lease, cut by the lim", "# Lease, cut by the lim"),
        ("```markdown\nRun:\n```python\nx = 1\n```\n```", "Run:\n```python\nx = 1\n```"),
        ("Text Recognition:\n```markdown\nThe lease\n```<|user|>", "The lease"),
        ("The lease<|user|>\n", "The lease"),
        ("The lease\n```\n```\n```\n```", "The lease"),
        ("The lease\n```", "The lease"),
        ("```markdown\n# A\n```\nis a heading.\n```", "```markdown\n# A\n```\nis a heading."),
        ("Text Recognition:", ""),
        ("```markdown\n```", ""),
    ],
)
def test_prompts_and_fences_around_an_answer_are_removed(said, meant):
    assert strip_prompt(said, PROMPT) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  The lease \n",
        "```\ncode\n```",
        "```python\nx = 1\n```",
        "Run:\n```\nls\n```",
        "```markdown\n# A\n```\nis how a heading is written.",
        "On Text Recognition: a survey",
        "The survey is named Text Recognition:",
        "Text recognition, then and now",
    ],
)
def test_the_words_of_a_page_are_kept(text):
    assert strip_prompt(text, PROMPT) == text


def test_without_a_prompt_only_fences_and_turn_markers_are_removed():
    assert strip_prompt("```md\nThe lease\n```<|endoftext|>", "") == "The lease"


@given(ANSWERS)
def test_the_result_is_a_part_of_the_answer_and_stripping_again_changes_nothing(text):
    left = strip_prompt(text, PROMPT)
    assert left in text
    assert strip_prompt(left, PROMPT) == left


@given(st.lists(st.sampled_from("abc \n"), max_size=20).map("".join))
def test_the_echo_is_removed_around_any_words(words):
    assert strip_prompt(f"{PROMPT}\n```markdown\n{words}\n```", PROMPT) == words.strip()


@pytest.mark.parametrize("piece", [PROMPT, "```markdown\n", "```\n", " ", "\n", f"{PROMPT}```md\n"])
def test_a_megabyte_of_one_piece_is_handled(piece):
    text = piece * (1_000_000 // len(piece))
    assert len(strip_prompt(text + "a\n" + text, PROMPT)) <= 2 * len(text) + 2
