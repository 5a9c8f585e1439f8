"""HTML tables as models write them, made whole: every tag closed, every word kept. Used by parsers.

A table that is whole already comes back as it was, to the letter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CELLS = frozenset({"td", "th", "caption"})
_SECTIONS = frozenset({"thead", "tbody", "tfoot"})
# What a row, a cell and the rest may stand in.
_PARENTS = {
    **dict.fromkeys(("td", "th"), frozenset({"tr"})),
    "tr": _SECTIONS | {"table"},
    **dict.fromkeys((*_SECTIONS, "caption"), frozenset({"table"})),
}
_WRAPPERS = {"td": "tr", "th": "tr", "tr": "table", "caption": "table"}
_WRAPPERS.update(dict.fromkeys(_SECTIONS, "table"))
# A table may stand in a cell; deeper ones are a model's loop.
_DEEPEST = 3

_ATTRIBUTES = frozenset({"rowspan", "colspan", "border", "class", "align", "valign", "scope"})
_SPAN = re.compile(r"[1-9]\d{0,2}")
_VALUE = r"\"[^\"<>]*\"|'[^'<>]*'|[^\s\"'<>=]+"
_ATTRIBUTE = re.compile(rf"\s+([\w:-]+)(?:\s*=\s*({_VALUE}))?")

_NAMES = "table|thead|tbody|tfoot|tr|td|th|caption"
_TAG = re.compile(
    rf"<(?P<end>/?)(?P<name>{_NAMES})(?P<attributes>\s[^<>]*?)?(?P<empty>/?)>", re.IGNORECASE
)
# A listing on the page may show tags: they are its text.
_LISTING = r"(?P<listing>^[ \t]*```.*?(?:^[ \t]*```[ \t]*$|\Z))"
_TAG_OR_LISTING = re.compile(f"{_LISTING}|{_TAG.pattern}", re.IGNORECASE | re.MULTILINE | re.DOTALL)
_CUT_TAG = re.compile(r"<(/?)([a-z]*)([ \t][^<>\n]*)?\Z", re.IGNORECASE)
_FIRST_PART = re.compile(r"\s*<(?:tr|td|th)[\s>]", re.IGNORECASE)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")

# Tags within a cell that say nothing, that part words, and that raise or lower a sign.
_SIGNS = {"sup": "^", "sub": "_"}
_SPACES = ("br", "p", "div", "li", "ul", "ol")
_SILENT = ("b", "i", "u", "em", "strong", "span", "font", "small", "center", "col", "colgroup")
_INLINE = re.compile(
    rf"<(/?)({'|'.join((*_SILENT, *_SPACES, *_SIGNS))})"
    rf"(?:\s+[\w:-]+\s*=\s*(?:{_VALUE}))*(?:\s*/)?>",
    re.IGNORECASE,
)
_OPENS_MARKUP = re.compile(r"<(?=[a-z/!?]|\Z)", re.IGNORECASE)
# Outside of tables only what would swallow a table after it; a<b stays.
_SWALLOWS = re.compile(
    rf"<(?=[!?]|/(?![a-z])|/?(?:{_NAMES}|script|style|title|textarea|template|iframe|xmp)\b)",
    re.IGNORECASE,
)


def repair(text: str) -> str:
    """The text with its tables made whole.

    Only tags of tables stay tags within a table; text outside cells gets a cell of its own. What
    is named like a table and has no cells is text, its tags escaped. Around tables only what
    would swallow them is escaped: comments, scripts, stray ends.
    """
    return _Repair(text).repaired() if _TAG.search(text) else text


@dataclass(slots=True)
class _Open:
    """An element that is open: as it was written, and where its tag stands in the output."""

    name: str
    source: str
    part: int
    has_cells: bool = False


class _Repair:
    """One walk over a text, from tag to tag, with the elements that are open."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._parts: list[str] = []
        self._open: list[_Open] = []
        # Nothing but space since the beginning or the last table.
        self._at_edge = True

    def repaired(self) -> str:
        """The whole text; to be asked for once."""
        place = 0
        while True:
            tag = (_TAG if self._open else _TAG_OR_LISTING).search(self._text, place)
            words = self._text[place : tag.start() if tag else None]
            if self._ends_without_end(words, tag):
                if tag is None:
                    words = _without_cut_tag(words)
                    self._text = self._text[:place] + words
                # Sought once more from there on: it may be a listing that follows.
                place += self._end_tables(words)
                continue
            self._words(words, tag)
            if tag is None:
                return "".join(self._parts)
            self._tag(tag)
            place = tag.end()

    def _ends_without_end(self, words: str, following: re.Match[str] | None) -> bool:
        """Whether no more of this table comes: nothing, or another table that is not in a cell."""
        if not self._open or following is None:
            return bool(self._open)
        if not _is_opening(following, "table"):
            return False
        in_cell = self._open[-1].name in _CELLS
        # A stray end before the words is dropped: what it parted is one text then.
        return not in_cell or bool(_until_blank_line(self._since_tag() + words)[1].strip())

    def _since_tag(self) -> str:
        """What the open cell has said after the last tag that stays."""
        said: list[str] = []
        for part in reversed(self._parts):
            if _OPENS_MARKUP.match(part):
                break
            said.append(part)
        return "".join(reversed(said))

    def _end_tables(self, words: str) -> int:
        """Close all; how many of the words are the last cell's, which a blank line ends."""
        inside, outside = "", words
        if self._open[-1].name in _CELLS:
            inside, outside = _until_blank_line(words)
        self._parts.append(_cell_text(inside))
        while self._open:
            self._close_last(followed=bool(outside.strip()))
        return len(inside)

    def _words(self, words: str, following: re.Match[str] | None) -> None:
        """What stands before the next tag."""
        if self._open:
            self._inside(words)
            return
        words = _SWALLOWS.sub("&lt;", words)
        if following is not None and following["name"]:
            words = _without_open_tag(words)
        self._outside(words)

    def _outside(self, words: str) -> None:
        self._parts.append(words)
        self._at_edge = self._at_edge and not words.strip()

    def _inside(self, words: str) -> None:
        """Words in a cell, if need be in one of their own; space may stand anywhere."""
        if words.strip() and self._open[-1].name not in _CELLS:
            self._make_room("td")
            self._push("td", "<td>")
        self._parts.append(_cell_text(words))

    def _tag(self, tag: re.Match[str]) -> None:
        if not tag["name"]:
            self._outside(tag[0])
        elif not self._open and not self._begins_table(tag):
            # After a table a spare end is an end too many; in running text it is a word.
            if not (self._at_edge and tag["end"]):
                self._outside(tag[0].replace("<", "&lt;"))
        elif tag["end"]:
            self._close(tag["name"].lower(), tag[0])
        else:
            self._begin(tag)

    def _begins_table(self, tag: re.Match[str]) -> bool:
        """Whether a tag outside of tables begins one, be it without the word."""
        name = tag["name"].lower()
        if tag["end"] or name == "table":
            return not tag["end"]
        return self._at_edge or (
            name not in _CELLS and _FIRST_PART.match(self._text, tag.end()) is not None
        )

    def _begin(self, tag: re.Match[str]) -> None:
        name = tag["name"].lower()
        self._make_room(name)
        self._push(name, _safe_tag(tag), tag[0])
        if tag["empty"]:
            self._close_last()

    def _make_room(self, name: str) -> None:
        """Close and open what must be, so that an element may stand here."""
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
            self._make_room(wrapper)
            self._push(wrapper, f"<{wrapper}>")

    def _push(self, name: str, tag: str, source: str = "") -> None:
        if name in _CELLS:
            next(e for e in reversed(self._open) if e.name == "table").has_cells = True
        self._open.append(_Open(name, source, len(self._parts)))
        self._parts.append(tag)

    def _close(self, name: str, source: str = "") -> None:
        """Close the innermost such element of this table; an end without a beginning is nothing."""
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
        """End the innermost element. A table without cells was a word, or nothing at all."""
        element = self._open.pop()
        if element.name == "table" and not element.has_cells:
            del self._parts[element.part :]
            if followed:
                self._outside(element.source.replace("<", "&lt;"))
            return
        self._parts.append(source or f"</{element.name}>")
        self._at_edge = not self._open


def _is_opening(tag: re.Match[str] | None, name: str) -> bool:
    return tag is not None and not tag["end"] and tag["name"].lower() == name


def _until_blank_line(words: str) -> tuple[str, str]:
    parting = _BLANK_LINE.search(words)
    return (words[: parting.start()], words[parting.start() :]) if parting else (words, "")


def _without_cut_tag(words: str) -> str:
    """Without the beginning of a tag at the very end, where an answer was cut."""
    cut = _CUT_TAG.search(words)
    if cut is None:
        return words
    names = _NAMES.split("|")
    name = cut[2].lower()
    begun = name in names if cut[3] else any(each.startswith(name) for each in names)
    return words[: cut.start()] if begun else words


def _without_open_tag(words: str) -> str:
    """With no tag that could go on into the next; none goes on after a blank line."""
    start = words.rfind(">") + 1
    for parting in _BLANK_LINE.finditer(words, start):
        start = parting.end()
    return words[:start] + _escaped(words[start:])


def _safe_tag(tag: re.Match[str]) -> str:
    """The tag as it is where nothing in it is foreign; else with what concerns a table."""
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
    """Text for a cell: no tag remains, and no two pieces become one."""
    parts: list[str] = []
    place = 0
    for tag in _INLINE.finditer(words):
        parts += [_escaped(words[place : tag.start()]), _instead_of(tag)]
        place = tag.end()
    return "".join([*parts, _escaped(words[place:])])


def _instead_of(tag: re.Match[str]) -> str:
    name = tag[2].lower()
    if name in _SPACES:
        return " "
    return "" if tag[1] else _SIGNS.get(name, "")


def _escaped(words: str) -> str:
    return _OPENS_MARKUP.sub("&lt;", words)
