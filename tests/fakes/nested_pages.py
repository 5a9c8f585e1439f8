"""Small PDFs whose pages take for ever: what they draw draws the next thing ten times, ten deep."""

from __future__ import annotations

import zlib

from tests.fakes.pdf_samples import FONT, HELVETICA, pdf_bytes, prose_stream, stream

_DEPTH, _TIMES = 10, 10
# Objects: 1 catalog, 2 page tree, 3 content, 4 the font, from 5 the chain, then the pages.
_FIRST = 5
_BOX = b"/BBox[0 0 612 792]"

Kind = str
KINDS: tuple[Kind, ...] = (
    "text", "drawing", "pattern", "soft_mask", "type3", "shading", "annotation", "deep_state",
    "long_stream", "image_bomb",
)  # fmt: skip


def nested(kind: Kind, pages: int = 1, *, good: tuple[int, ...] = ()) -> bytes:
    """A PDF of bad pages of one kind; the pages in `good`, from 1, are one line of prose."""
    chain, page = _BUILDERS[kind]()
    first_page = _FIRST + len(chain)
    kids = b" ".join(b"%d 0 R" % (first_page + number) for number in range(pages))
    prose = b"/Contents 3 0 R/Resources<<%s>>" % FONT.replace(b"5 0 R", b"4 0 R")
    entries = [prose if number + 1 in good else page for number in range(pages)]
    return pdf_bytes(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, pages),
        stream(b"", prose_stream()),
        HELVETICA,
        *chain,
        *(b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]%s>>" % entry for entry in entries),
    )


def _forms(leaf: bytes) -> list[bytes]:
    """Forms of which each draws the one before ten times."""
    forms = [_form(leaf, b"/Font<</F1 4 0 R>>")]
    for depth in range(1, _DEPTH):
        forms.append(_form(b"/X Do " * _TIMES, b"/XObject<</X %d 0 R>>" % (_FIRST + depth - 1)))
    return forms


def _form(data: bytes, resources: bytes, more: bytes = b"") -> bytes:
    return stream(b"/Type/XObject/Subtype/Form%s/Resources<<%s>>%s" % (_BOX, resources, more), data)


def _page_of(chain: list[bytes], data: bytes, resources: bytes) -> tuple[list[bytes], bytes]:
    contents = _FIRST + len(chain)
    page = b"/Contents %d 0 R/Resources<<%s>>" % (contents, resources)
    return [*chain, stream(b"", data)], page


def _text() -> tuple[list[bytes], bytes]:
    chain = _forms(prose_stream())
    return _page_of(chain, b"/X Do", b"/XObject<</X %d 0 R>>" % (_FIRST + len(chain) - 1))


def _drawing() -> tuple[list[bytes], bytes]:
    chain = _forms(b"0 0 m 600 700 l 300 20 l h f ")
    return _page_of(chain, b"/X Do", b"/XObject<</X %d 0 R>>" % (_FIRST + len(chain) - 1))


def _pattern() -> tuple[list[bytes], bytes]:
    entries = b"/Type/Pattern/PatternType 1/PaintType 1/TilingType 1/BBox[0 0 9 9]"
    steps = b"/XStep 0.01/YStep 0.01"
    chain = [stream(entries + steps + b"/Resources<<>>", b"1 0 0 rg 0 0 5 5 re f")]
    for depth in range(1, 4):
        resources = b"/Resources<</Pattern<</P %d 0 R>>>>" % (_FIRST + depth - 1)
        fill = b"/Pattern cs /P scn 0 0 9 9 re f " * _TIMES
        chain.append(stream(entries + steps + resources, fill))
    last = _FIRST + len(chain) - 1
    fill = b"/Pattern cs /P scn 0 0 612 792 re f"
    return _page_of(chain, fill, b"/Pattern<</P %d 0 R>>" % last)


def _soft_mask() -> tuple[list[bytes], bytes]:
    group = b"/Group<</S/Transparency/CS/DeviceGray>>"
    chain = [_form(b"0.5 g 0 0 612 792 re f", b"", group)]
    for depth in range(1, _DEPTH):
        mask = b"<</SMask<</S/Luminosity/G %d 0 R>>>>" % (_FIRST + depth - 1)
        data = b"/G gs 0 0 612 792 re f " * _TIMES
        chain.append(_form(data, b"/ExtGState<</G %s>>" % mask, group))
    mask = b"<</SMask<</S/Luminosity/G %d 0 R>>>>" % (_FIRST + len(chain) - 1)
    return _page_of(chain, b"/G gs 0 0 612 792 re f", b"/ExtGState<</G %s>>" % mask)


def _type3() -> tuple[list[bytes], bytes]:
    chain = _forms(b"0 0 m 600 700 l 300 20 l h f ")
    last = _FIRST + len(chain) - 1
    glyph = stream(b"", b"600 0 d0 /X Do")
    font = (
        b"<</Type/Font/Subtype/Type3/FontBBox[0 0 600 800]/FontMatrix[.001 0 0 .001 0 0]"
        b"/FirstChar 65/LastChar 65/Widths[600]/CharProcs<</A %d 0 R>>"
        b"/Encoding<</Type/Encoding/Differences[65/A]>>/Resources<</XObject<</X %d 0 R>>>>>>"
        % (last + 1, last)
    )
    chain += [glyph, font]
    shown = b"BT /T 12 Tf 72 700 Td (" + b"A" * 60 + b") Tj ET"
    return _page_of(chain, shown, b"/Font<</T %d 0 R>>" % (last + 2))


def _shading() -> tuple[list[bytes], bytes]:
    program = b"{" + b"2 copy mul sin exch pop " * 400 + b"dup dup}"
    function = stream(b"/FunctionType 4/Domain[0 612 0 792]/Range[0 1 0 1 0 1]", program)
    shading = b"<</ShadingType 1/ColorSpace/DeviceRGB/Domain[0 612 0 792]/Function %d 0 R>>" % (
        _FIRST
    )
    data = b"/S sh " * 5000
    return _page_of([function, shading], data, b"/Shading<</S %d 0 R>>" % (_FIRST + 1))


def _annotation() -> tuple[list[bytes], bytes]:
    chain = _forms(prose_stream())
    last = _FIRST + len(chain) - 1
    annotation = b"<</Type/Annot/Subtype/Stamp/Rect[0 0 612 792]/AP<</N %d 0 R>>>>" % last
    chain.append(annotation)
    return chain, b"/Contents 3 0 R/Resources<<>>/Annots[%d 0 R]" % (last + 1)


def _deep_state() -> tuple[list[bytes], bytes]:
    data = b"q " * 300_000 + b"0 0 600 700 re f " + b"Q " * 300_000
    return _page_of([], data, b"")


def _long_stream() -> tuple[list[bytes], bytes]:
    packed = zlib.compress(b"0 0 m 600 700 l 300 20 l h f " * 4_000_000, 9)
    contents = stream(b"/Filter/FlateDecode", packed)
    return [contents], b"/Contents %d 0 R/Resources<<>>" % _FIRST


def _image_bomb() -> tuple[list[bytes], bytes]:
    packed = zlib.compress(bytes(1 << 24), 9)
    picture = stream(
        b"/Type/XObject/Subtype/Image/Width 60000/Height 60000/ColorSpace/DeviceRGB"
        b"/BitsPerComponent 8/Interpolate true/Filter/FlateDecode",
        packed,
    )
    data = b"q 612 0 0 792 0 0 cm /I Do Q " * 200
    return _page_of([picture], data, b"/XObject<</I %d 0 R>>" % _FIRST)


_BUILDERS = {
    "text": _text,
    "drawing": _drawing,
    "pattern": _pattern,
    "soft_mask": _soft_mask,
    "type3": _type3,
    "shading": _shading,
    "annotation": _annotation,
    "deep_state": _deep_state,
    "long_stream": _long_stream,
    "image_bomb": _image_bomb,
}
