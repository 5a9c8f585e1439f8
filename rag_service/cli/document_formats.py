"""A document's pages as Markdown, plain text or one JSON object."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rag_service.knowledgebase.views import DocumentView, PageView


class Format(StrEnum):
    """The format in which a document is printed."""

    MD = "md"
    JSON = "json"
    TEXT = "text"


SUFFIXES = {Format.MD: ".md", Format.JSON: ".json", Format.TEXT: ".txt"}
# As pdftotext ends each page.
_PAGE_END = "\f"

_HEADING = re.compile(r"^ {0,3}#{1,6}\s+", re.MULTILINE)
_TABLE_RULE = re.compile(r"^ {0,3}\|(?:[ \t]*:?-+:?[ \t]*\|)+[ \t]*\n?", re.MULTILINE)
_TABLE_ROW = re.compile(r"^ {0,3}\|(.*)\|[ \t]*$", re.MULTILINE)
_CELL_EDGE = re.compile(r"\s*(?<!\\)\|\s*")
_STRONG = re.compile(r"(?<!\\)\*\*(?=\S)(.+?)(?<=[^\s\\])\*\*")
_ESCAPE = re.compile(r"\\([!-/:-@\[-`{-~])")


def document(view: DocumentView, pages: Iterable[PageView], form: Format) -> Iterator[str]:
    """Yield the document in pieces; the last one ends in a newline or form feed."""
    if form is Format.JSON:
        yield json_line(view, pages)
        return
    if form is Format.MD:
        from rag_service.knowledgebase.document_markdown import document_head

        yield document_head(view)
    for found in pages:
        yield page(found, form)


def json_line(view: DocumentView, pages: Iterable[PageView]) -> str:
    """Return {"document": …, "pages": […]} on one line."""
    inside = ",".join(page.model_dump_json() for page in pages)
    return f'{{"document":{view.model_dump_json()},"pages":[{inside}]}}\n'


def page(found: PageView, form: Format) -> str:
    """Return one page in this format."""
    if form is Format.JSON:
        return found.model_dump_json() + "\n"
    if form is Format.TEXT:
        text = plain_text(found.markdown).strip()
        return f"{text}\n{_PAGE_END}"
    from rag_service.knowledgebase.document_markdown import page_section

    return page_section(found)


def plain_text(markdown: str) -> str:
    """Return Markdown without its markup; the cells of a table are separated by tabs."""
    text = _TABLE_RULE.sub("", markdown)
    text = _TABLE_ROW.sub(lambda row: _CELL_EDGE.sub("\t", row[1].strip()), text)
    text = _STRONG.sub(r"\1", _HEADING.sub("", text))
    return _ESCAPE.sub(r"\1", text)
