"""Regions of a page as Markdown, in the form that the glmocr SDK writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rag_service.layout.page_layout import Bbox, Task
from rag_service.ocr.cleanup.html_tables import repair
from rag_service.parsers import model_markdown
from rag_service.parsers.contract import Region

# The prompts that GLM-OCR was trained with, from its model card.
PROMPTS: Mapping[Task, str] = MappingProxyType(
    {
        Task.TEXT: "Text Recognition:",
        Task.TABLE: "Table Recognition:",
        Task.FORMULA: "Formula Recognition:",
    }
)

_TITLES = {"doc_title": model_markdown.TOP, "paragraph_title": model_markdown.PART}
_NUMBER = "formula_number"
# Text that continues from block to block; titles, captions and seals do not.
_RUNNING = frozenset(
    {"abstract", "content", "footnote", "reference_content", "text", "vision_footnote"}
)
_BRACKETS = (("(", ")"), ("（", "）"))
_NOT_IN_TAG = re.compile(r"[\n{}]")
_FORMULA_END = "\n$$"
# How far the left edges of one list may differ, in thousandths of the page's width.
_SAME_EDGE = 10


def content_for(label: str, task: Task, text: str) -> str:
    """Return the Markdown of a region from the model's answer; "" if it has none.

    A picture has none: `page_markdown` links to it.
    """
    if task is Task.TABLE:
        return _table(text)
    if task is Task.FORMULA:
        return model_markdown.formula(text)
    if task is not Task.TEXT:
        return ""
    sign = _TITLES.get(label)
    return model_markdown.title(text, sign) if sign else model_markdown.paragraph(text)


def whole_page(text: str) -> str:
    """Return the Markdown of a page that was read as a whole."""
    return repair(model_markdown.clean(text))


def page_markdown(regions: Sequence[Region], number: int) -> str:
    """Return the page's Markdown from its regions in reading order, joined by `join_blocks`.

    A region without content becomes a link to its part of the page's picture, relative to the
    document's URL.
    """
    blocks = join_blocks(regions)
    return "\n\n".join(
        block.content if block.content.strip() else _picture(block.label, block.bbox, number)
        for block in blocks
    )


def join_blocks(regions: Sequence[Region]) -> list[Region]:
    """Tag formulas with their numbers, join broken words, fill gaps in lists; renumber from 0."""
    blocks = _with_list_items(_with_whole_words(_with_tagged_formulas(regions)))
    return [replace(block, index=index) for index, block in enumerate(blocks)]


def _picture(label: str, bbox: Bbox, number: int) -> str:
    return f"![{label}](pages/{number}/image?bbox={','.join(map(str, bbox))})"


def _table(text: str) -> str:
    words = text.strip()
    whole = words.startswith("<table") and words.endswith("</table>")
    return repair(words if whole else model_markdown.clean(words)).strip()


def _with_tagged_formulas(regions: Sequence[Region]) -> list[Region]:
    """Add the number beside a formula to it as its tag.

    A number without a formula stays a block; the SDK leaves it out.
    """
    blocks: list[Region] = []
    for region in regions:
        last = blocks[-1] if blocks else None
        if last and _is_number(region) and _takes_number(last):
            blocks[-1] = _tagged(last, region)
        elif last and _is_number(last) and _takes_number(region):
            blocks[-1] = _tagged(region, last)
        else:
            blocks.append(region)
    return blocks


def _is_number(block: Region) -> bool:
    """Return True if the block can be a tag: text of one line, no brace that would end it."""
    words = block.content.strip()
    return block.label == _NUMBER and bool(words) and not _NOT_IN_TAG.search(words)


def _takes_number(block: Region) -> bool:
    content = block.content
    return content.startswith("$$") and content.endswith(_FORMULA_END) and "\\tag{" not in content


def _tagged(formula: Region, number: Region) -> Region:
    words = number.content.strip()
    for opening, closing in _BRACKETS:
        if words.startswith(opening) and words.endswith(closing):
            words = words[1:-1]
            break
    body = formula.content.removesuffix(_FORMULA_END)
    return replace(formula, content=f"{body} \\tag{{{words}}}{_FORMULA_END}")


def _with_whole_words(blocks: Sequence[Region]) -> list[Region]:
    """Join a block that ends in a broken word with the next block of text.

    Tables, pictures and titles may be between the two.
    """
    joined: list[Region] = []
    broken: int | None = None
    for block in blocks:
        if block.label not in _RUNNING:
            joined.append(block)
            continue
        if broken is not None and block.content.lstrip()[:1].islower():
            first = joined[broken]
            whole = first.content.rstrip()[:-1] + block.content.lstrip()
            joined[broken] = replace(first, content=whole)
        else:
            joined.append(block)
            broken = len(joined) - 1
        if not _ends_broken(joined[broken].content):
            broken = None
    return joined


def _ends_broken(content: str) -> bool:
    end = content.rstrip()[-2:]
    return len(end) == 2 and end[0].isalpha() and end[1] == "-"


def _with_list_items(blocks: Sequence[Region]) -> list[Region]:
    """Make a text between two items of a list, aligned with both, an item too."""
    listed = list(blocks)
    for place in range(1, len(listed) - 1):
        before, block, after = listed[place - 1 : place + 2]
        if _is_item(before) and _is_item(after) and _may_be_item(block, before, after):
            listed[place] = replace(block, content=f"- {block.content}")
    return listed


def _is_item(block: Region) -> bool:
    return block.label == "text" and block.content.startswith("- ")


def _may_be_item(block: Region, before: Region, after: Region) -> bool:
    edges = [abs(block.bbox[0] - other.bbox[0]) for other in (before, after)]
    aligned = max(edges) <= _SAME_EDGE
    return block.label == "text" and bool(block.content) and not _is_item(block) and aligned
