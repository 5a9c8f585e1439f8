"""Repairs the HTML tables that models write: every tag is closed, every word is kept.

A correct table is returned unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CELLS = frozenset({"td", "th", "caption"})
_SECTIONS = frozenset({"thead", "tbody", "tfoot"})
# The elements that may contain a cell, a row, a section or a caption.
_PARENTS = {
    **dict.fromkeys(("td", "th"), frozenset({"tr"})),
    "tr": _SECTIONS | {"table"},
    **dict.fromkeys((*_SECTIONS, "caption"), frozenset({"table"})),
}
_WRAPPERS = {"td": "tr", "th": "tr", "tr": "table", "caption": "table"}
_WRAPPERS.update(dict.fromkeys(_SECTIONS, "table"))
# How deep tables may be nested; deeper ones are a model's loop.
_DEEPEST = 3

_ATTRIBUTES = frozenset({"rowspan", "colspan", "border", "class", "align", "valign", "scope"})
_SPAN = re.compile(r"[1-9]\d{0,2}")
_VALUE = r"\"[^\"<>]*\"|'[^'<>]*'|[^\s\"'<>=]+"
_ATTRIBUTE = re.compile(rf"\s+([\w:-]+)(?:\s*=\s*({_VALUE}))?")

_NAMES = "table|thead|tbody|tfoot|tr|td|th|caption"
_TAG = re.compile(
    rf"<(?P<end>/?)(?P<name>{_NAMES})(?P<attributes>\s[^<>]*?)?(?P<empty>/?)>", re.IGNORECASE
)
# Tags in a listing are its text.
_LISTING = r"(?P<listing>^[ \t]*```.*?(?:^[ \t]*```[ \t]*$|\Z))"
_TAG_OR_LISTING = re.compile(f"{_LISTING}|{_TAG.pattern}", re.IGNORECASE | re.MULTILINE | re.DOTALL)
_CUT_TAG = re.compile(r"<(/?)([a-z]*)([ \t][^<>\n]*)?\Z", re.IGNORECASE)
_FIRST_PART = re.compile(r"\s*<(?:tr|td|th)[\s>]", re.IGNORECASE)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")

# Tags within a cell that become a sign, that become a space, and that are dropped.
_SIGNS = {"sup": "^", "sub": "_"}
_SPACES = ("br", "p", "div", "li", "ul", "ol")
_DROPPED = ("b", "i", "u", "em", "strong", "span", "font", "small", "center", "col", "colgroup")
_INLINE = re.compile(
    rf"<(/?)({'|'.join((*_DROPPED, *_SPACES, *_SIGNS))})"
    rf"(?:\s+[\w:-]+\s*=\s*(?:{_VALUE}))*(?:\s*/)?>",
    re.IGNORECASE,
)
_OPENS_MARKUP = re.compile(r"<(?=[a-z/!?]|\Z)", re.IGNORECASE)
# Outside tables, only tags that would hide a following table; a<b is kept.
_SWALLOWS = re.compile(
    rf"<(?=[!?]|/(?![a-z])|/?(?:{_NAMES}|script|style|title|textarea|template|iframe|xmp)\b)",
    re.IGNORECASE,
)


def repair(text: str) -> str:
    """Return the text with its tables repaired.

    Within a table, only the tags of tables stay tags; text outside cells gets its own cell. A
    table without cells is text, its tags escaped. Outside tables, only markup that would hide
    them is escaped: comments, scripts, stray end tags.
    """
    return _Repair(text).repaired() if _TAG.search(text) else text


@dataclass(slots=True)
class _Open:
    """An open element: its source, and the index of its tag among the output's parts."""

    name: str
    source: str
    part: int
    has_cells: bool = False


class _Repair:
    """One pass over a text, from tag to tag, with the open elements."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._parts: list[str] = []
        self._open: list[_Open] = []
        # Only space since the beginning or the last table.
        self._at_edge = True

    def repaired(self) -> str:
        """Return the repaired text. Call it once."""
        place = 0
        while True:
            tag = (_TAG if self._open else _TAG_OR_LISTING).search(self._text, place)
            words = self._text[place : tag.start() if tag else None]
            if self._table_ends_unclosed(words, tag):
                if tag is None:
                    words = _without_cut_tag(words)
                    self._text = self._text[:place] + words
                # Searched again from there: the next match may be a listing.
                place += self._end_tables(words)
                continue
            self._add_words(words, tag)
            if tag is None:
                return "".join(self._parts)
            self._add_tag(tag)
            place = tag.end()

    def _table_ends_unclosed(self, words: str, following: re.Match[str] | None) -> bool:
        """Return True if the text or a new table outside a cell follows the open table."""
        if not self._open or following is None:
            return bool(self._open)
        if not _is_opening(following, "table"):
            return False
        in_cell = self._open[-1].name in _CELLS
        # A stray end tag before the words is dropped, so the text around it is one.
        return not in_cell or bool(_until_blank_line(self._text_since_tag() + words)[1].strip())

    def _text_since_tag(self) -> str:
        """Return the open cell's text after the last kept tag."""
        texts: list[str] = []
        for part in reversed(self._parts):
            if _OPENS_MARKUP.match(part):
                break
            texts.append(part)
        return "".join(reversed(texts))

    def _end_tables(self, words: str) -> int:
        """Close all elements. Return the length of the last cell's text: up to a blank line."""
        inside, outside = "", words
        if self._open[-1].name in _CELLS:
            inside, outside = _until_blank_line(words)
        self._parts.append(_cell_text(inside))
        while self._open:
            self._close_last(followed=bool(outside.strip()))
        return len(inside)

    def _add_words(self, words: str, following: re.Match[str] | None) -> None:
        """Add the text before the next tag."""
        if self._open:
            self._add_inside(words)
            return
        words = _SWALLOWS.sub("&lt;", words)
        if following is not None and following["name"]:
            words = _without_open_tag(words)
        self._add_outside(words)

    def _add_outside(self, words: str) -> None:
        self._parts.append(words)
        self._at_edge = self._at_edge and not words.strip()

    def _add_inside(self, words: str) -> None:
        """Add text to the open cell, or to a new one; space may be anywhere."""
        if words.strip() and self._open[-1].name not in _CELLS:
            self._prepare_for("td")
            self._push("td", "<td>")
        self._parts.append(_cell_text(words))

    def _add_tag(self, tag: re.Match[str]) -> None:
        if not tag["name"]:
            self._add_outside(tag[0])
        elif not self._open and not self._begins_table(tag):
            # A stray end tag after a table is dropped; in running text it is text.
            if not (self._at_edge and tag["end"]):
                self._add_outside(tag[0].replace("<", "&lt;"))
        elif tag["end"]:
            self._close(tag["name"].lower(), tag[0])
        else:
            self._begin(tag)

    def _begins_table(self, tag: re.Match[str]) -> bool:
        """Return True if a tag outside tables begins one, even without <table>."""
        name = tag["name"].lower()
        if tag["end"] or name == "table":
            return not tag["end"]
        return self._at_edge or (
            name not in _CELLS and _FIRST_PART.match(self._text, tag.end()) is not None
        )

    def _begin(self, tag: re.Match[str]) -> None:
        name = tag["name"].lower()
        self._prepare_for(name)
        self._push(name, _safe_tag(tag), tag[0])
        if tag["empty"]:
            self._close_last()

    def _prepare_for(self, name: str) -> None:
        """Close and open elements until an element of this name is allowed here."""
        if name == "table":
            depth = sum(element.name == "table" for element in self._open)
            if self._open and (self._open[-1].name not in _CELLS or depth >= _DEEPEST):
                self._close("table")
            return
        wanted = _PARENTS[name]
        while self._open and self._open[-1].name not in wanted | {"table"}:
            self._close_last()
        if not self._open or self._open[-1].name not in wanted:
            wrapper = _WRAPPERS[name]
            self._prepare_for(wrapper)
            self._push(wrapper, f"<{wrapper}>")

    def _push(self, name: str, tag: str, source: str = "") -> None:
        if name in _CELLS:
            next(e for e in reversed(self._open) if e.name == "table").has_cells = True
        self._open.append(_Open(name, source, len(self._parts)))
        self._parts.append(tag)

    def _close(self, name: str, source: str = "") -> None:
        """Close the innermost such element of this table; ignore an end tag without a start."""
        names = {"td", "th"} if name in {"td", "th"} else {name}
        for place in range(len(self._open) - 1, -1, -1):
            if self._open[place].name in names:
                while len(self._open) > place + 1:
                    self._close_last()
                self._close_last(source if self._open[-1].name == name else "")
                return
            if self._open[place].name == "table":
                return

    def _close_last(self, source: str = "", *, followed: bool = False) -> None:
        """End the innermost element. A table without cells becomes text if text follows it."""
        element = self._open.pop()
        if element.name == "table" and not element.has_cells:
            del self._parts[element.part :]
            if followed:
                self._add_outside(element.source.replace("<", "&lt;"))
            return
        self._parts.append(source or f"</{element.name}>")
        self._at_edge = not self._open


def _is_opening(tag: re.Match[str] | None, name: str) -> bool:
    return tag is not None and not tag["end"] and tag["name"].lower() == name


def _until_blank_line(words: str) -> tuple[str, str]:
    blank = _BLANK_LINE.search(words)
    return (words[: blank.start()], words[blank.start() :]) if blank else (words, "")


def _without_cut_tag(words: str) -> str:
    """Remove the beginning of a tag at the very end, left by an answer that was cut."""
    cut = _CUT_TAG.search(words)
    if cut is None:
        return words
    names = _NAMES.split("|")
    name = cut[2].lower()
    begun = name in names if cut[3] else any(each.startswith(name) for each in names)
    return words[: cut.start()] if begun else words


def _without_open_tag(words: str) -> str:
    """Escape an unfinished tag that would continue into the next; a blank line ends it."""
    start = words.rfind(">") + 1
    for blank in _BLANK_LINE.finditer(words, start):
        start = blank.end()
    return words[:start] + _escaped(words[start:])


def _safe_tag(tag: re.Match[str]) -> str:
    """Return the tag with only the attributes that concern tables."""
    attributes = tag["attributes"] or ""
    found = list(_ATTRIBUTE.finditer(attributes))
    kept = [each for each in found if _concerns_table(each)]
    whole = "".join(each[0] for each in kept)
    if not tag["empty"] and whole == attributes.rstrip():
        return tag[0]
    return f"<{tag['name'].lower()}{whole}>"


def _concerns_table(attribute: re.Match[str]) -> bool:
    name, value = attribute[1].lower(), (attribute[2] or "").strip("\"'")
    if name in {"rowspan", "colspan"}:
        return _SPAN.fullmatch(value) is not None
    return name in _ATTRIBUTES


def _cell_text(words: str) -> str:
    """Return text for a cell: no tag remains, and words stay separate."""
    parts: list[str] = []
    place = 0
    for tag in _INLINE.finditer(words):
        parts += [_escaped(words[place : tag.start()]), _replacement(tag)]
        place = tag.end()
    return "".join([*parts, _escaped(words[place:])])


def _replacement(tag: re.Match[str]) -> str:
    name = tag[2].lower()
    if name in _SPACES:
        return " "
    return "" if tag[1] else _SIGNS.get(name, "")


def _escaped(words: str) -> str:
    return _OPENS_MARKUP.sub("&lt;", words)
