"""Pages as Markdown and as plain text."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rag_service.cli.document_formats import Format, document, page, plain_text
from rag_service.knowledgebase.document_markdown import document_head
from rag_service.knowledgebase.views import ErrorView
from rag_service.states import PageState, RunState
from tests.views import page_view, view


def test_markdown_marks_document_and_pages() -> None:
    text = "".join(document(view(), [page_view(1, "# One"), page_view(2, "Two")], Format.MD))
    assert text == (
        "<!-- document: a.pdf, processed -->\n\n"
        "<!-- page 1 -->\n\n# One\n\n<!-- page 2 -->\n\nTwo\n\n"
    )


def test_a_page_without_text_shows_the_reason() -> None:
    error = ErrorView(code="page_timeout", message="", retryable=False)
    failed = page_view(3, "", status=PageState.FAILED, error=error)
    blank = page_view(4, "", status=PageState.BLANK)
    assert page(failed, Format.MD) == "<!-- page 3: failed, page_timeout -->\n\n"
    assert page(blank, Format.MD) == "<!-- page 4: blank -->\n\n"


@given(st.text())
def test_no_filename_ends_its_comment(filename: str) -> None:
    head = document_head(view(filename=filename))
    assert head.startswith("<!-- document: ")
    assert head.index("-->") == len(head) - len("-->\n\n")
    assert "\n" not in head.rstrip("\n")


def test_json_is_one_line_with_document_and_pages() -> None:
    [line] = "".join(document(view(), [page_view(1), page_view(2)], Format.JSON)).splitlines()
    found = json.loads(line)
    assert found["document"]["status"] == RunState.PROCESSED
    assert [one["number"] for one in found["pages"]] == [1, 2]


def test_plain_text_has_no_markup() -> None:
    table = "| a | b |\n|---|:-:|\n| 1 | x \\| y |\n"
    markdown = f"## Title\n\nSome **strong** words, 2 \\* 3.\n\n{table}"
    assert plain_text(markdown) == "Title\n\nSome strong words, 2 * 3.\n\na\tb\n1\tx | y\n"


def test_plain_text_keeps_text_that_only_looks_like_markup() -> None:
    for text in ("#1 in sales", "a ** b ** c", "5 | 6", "---"):
        assert plain_text(text) == text


def test_text_pages_end_in_form_feeds() -> None:
    text = "".join(document(view(), [page_view(1, "# One"), page_view(2, "")], Format.TEXT))
    assert text == "One\n\f\n\f"
