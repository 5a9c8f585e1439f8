"""Small files that cost a careless reader much time, memory or disk: a function for each kind.

Their sizes, counts and depths are larger than they look, and their data unpack to gigabytes.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pymupdf
from PIL import Image

from tests.fakes.pdf_samples import (
    endless_page,
    one_page,
    pdf_bytes,
    prose_stream,
    stream,
    undrawable_page,
)

MIB = 1 << 20
_PAGE = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]>>"


def _deflated(entries: bytes, piece: bytes, times: int, layers: int = 1) -> bytes:
    """A stream of `times` pieces, compressed `layers` times."""
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(piece) for _ in range(times)) + packer.flush()
    for _ in range(layers - 1):
        data = zlib.compress(data, 9)
    return stream(entries + b"/Filter[%s]" % (b"/FlateDecode" * layers), data)


def _image(width: int, height: int, bits: int, space: bytes, data: bytes) -> bytes:
    entries = b"/Type/XObject/Subtype/Image/Width %d/Height %d/BitsPerComponent %d/ColorSpace %s"
    return stream(entries % (width, height, bits, space) + b"/Filter/FlateDecode", data)


def _drawn_image(image: bytes) -> bytes:
    return one_page(b"q 612 0 0 792 0 0 cm /I Do Q", b"/XObject<</I 6 0 R>>", image)


def content_of_a_gigabyte() -> bytes:
    """A content stream of 1 GiB of spaces."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        _PAGE[:-2] + b"/Contents 4 0 R>>",
        _deflated(b"", b" " * MIB, 1024),
    ]
    return pdf_bytes(*objects)


def content_compressed_twice() -> bytes:
    """A few kilobytes that become 1 GiB of drawing through two filters."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        _PAGE[:-2] + b"/Contents 4 0 R>>",
        _deflated(b"", b"0 0 m 9 9 l S " * (MIB // 14), 1024, layers=2),
    ]
    return pdf_bytes(*objects)


def picture_of_gigapixels() -> bytes:
    """A page with a bitmap of 40,000 by 40,000 pixels in colour: 4.8 GB when decoded."""
    packer = zlib.compressobj(9)
    row = bytes(40_000 * 3)
    data = b"".join(packer.compress(row) for _ in range(4000)) + packer.flush()
    return _drawn_image(_image(40_000, 40_000, 8, b"/DeviceRGB", data))


def bilevel_picture_of_gigapixels() -> bytes:
    """A page with a bitmap of 60,000 by 60,000 pixels, black and white."""
    packer = zlib.compressobj(9)
    row = bytes(7500)
    data = b"".join(packer.compress(row) for _ in range(60_000)) + packer.flush()
    return _drawn_image(_image(60_000, 60_000, 1, b"/DeviceGray", data))


def many_pictures_on_a_page() -> bytes:
    """Sixty different pictures of 6,000 by 6,000 pixels on one page."""
    images = []
    for shade in range(60):
        data = zlib.compress(bytes([shade]) * 36_000_000, 1)
        images.append(_image(6000, 6000, 8, b"/DeviceGray", data))
    names = b"".join(b"/I%d %d 0 R" % (number, 6 + number) for number in range(60))
    drawn = b"".join(b"q 60 0 0 60 %d %d cm /I%d Do Q " % (n % 10 * 60, n // 10 * 60, n)
                     for n in range(60))  # fmt: skip
    return one_page(drawn, b"/XObject<<%s>>" % names, *images)


def page_of_kilometres() -> bytes:
    """A page that says it is 350 km wide and high."""
    return one_page(prose_stream(), b"").replace(b"[0 0 612 792]", b"[0 0 1e9 1e9]")


def page_of_a_hair() -> bytes:
    """A page of 10,000 by 0.001 points."""
    return one_page(prose_stream(), b"").replace(b"[0 0 612 792]", b"[0 0 1e4 1e-3]")


def count_of_a_billion() -> bytes:
    """A page tree that says it has a billion pages and has one."""
    return one_page(prose_stream(), b"").replace(b"/Count 1", b"/Count 1000000000")


def page_tree_in_a_circle() -> bytes:
    """A page tree whose child is its parent."""
    return pdf_bytes(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 2>>",
        b"<</Type/Pages/Parent 2 0 R/Kids[2 0 R 3 0 R]/Count 2>>",
    )


def one_page_shown_often() -> bytes:
    """A page tree of 4,000 references to the same heavy page."""
    kids = b"3 0 R " * 4000
    return pdf_bytes(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count 4000>>" % kids,
        _PAGE[:-2] + b"/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        stream(b"", prose_stream() * 2000),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )


def arrays_in_arrays() -> bytes:
    """An array 200,000 deep in the page."""
    deep = b"[" * 200_000 + b"]" * 200_000
    return one_page(prose_stream(), b"").replace(b"/Type/Page/", b"/Deep %s/Type/Page/" % deep)


def page_tree_of_depth() -> bytes:
    """A page tree 20,000 levels deep."""
    depth = 20_000
    nodes = [
        b"<</Type/Pages/Kids[%d 0 R]/Count 1%s>>"
        % (number + 3, b"/Parent %d 0 R" % (number + 1) if number else b"")
        for number in range(depth)
    ]
    page = b"<</Type/Page/Parent %d 0 R/MediaBox[0 0 612 792]>>" % (depth + 1)
    return pdf_bytes(b"<</Type/Catalog/Pages 2 0 R>>", *nodes, page)


def table_of_a_billion_objects() -> bytes:
    """A cross-reference table that says it has two billion entries."""
    whole = one_page(prose_stream(), b"")
    return whole.replace(b"/Size 6", b"/Size 2147483647").replace(
        b"xref\n0 6", b"xref\n0 2147483647"
    )


def previous_table_in_a_circle() -> bytes:
    """A cross-reference table whose predecessor is itself."""
    whole = one_page(prose_stream(), b"")
    start = int(whole.rsplit(b"startxref\n", 1)[1].split(b"\n")[0])
    return whole.replace(b"trailer<<", b"trailer<</Prev %d" % start)


def soft_masks_in_soft_masks() -> bytes:
    """Ten groups, each drawn three times under a mask that draws the next."""
    objects, first = [], 6
    for level in range(10):
        form, state = first + 2 * level, first + 2 * level + 1
        inner = b"/G gs /X Do /X Do /X Do" if level < 9 else b"0 0 612 792 re f"
        below = (
            b"/ExtGState<</G %d 0 R>>/XObject<</X %d 0 R>>" % (state + 2, form + 2)
            if level < 9
            else b""
        )
        objects.append(
            stream(
                b"/Type/XObject/Subtype/Form/BBox[0 0 612 792]/Resources<<%s>>"
                b"/Group<</S/Transparency/CS/DeviceGray>>" % below,
                inner,
            )
        )
        objects.append(b"<</Type/ExtGState/SMask<</S/Luminosity/G %d 0 R>>>>" % form)
    return one_page(
        b"/G gs /X Do 0 0 612 792 re f",
        b"/ExtGState<</G 7 0 R>>/XObject<</X 6 0 R>>",
        *objects,
    )


def shading_of_samples() -> bytes:
    """A shading by a function of a million samples in four inputs, drawn 500 times."""
    function = _deflated(
        b"/FunctionType 0/Domain[0 1 0 1 0 1 0 1]/Range[0 1]/Size[64 64 64 64]/BitsPerSample 8",
        b"\x55" * MIB,
        16,
    )
    shading = b"<</ShadingType 1/ColorSpace/DeviceGray/Domain[0 1 0 1]/Function 7 0 R>>"
    return one_page(b"/S sh " * 500, b"/Shading<</S 6 0 R>>", shading, function)


def words_by_the_million() -> bytes:
    """One page with four million words of text, one over the other."""
    return one_page(prose_stream("one word and another " * 4) * 250_000, b"")


def paths_by_the_million() -> bytes:
    """One page with six million curves."""
    piece = b"1 2 m 300 400 500 600 700 100 c S "
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        _PAGE[:-2] + b"/Contents 4 0 R>>",
        _deflated(b"", piece * 1000, 6000),
    ]
    return pdf_bytes(*objects)


def glyph_that_draws_itself() -> bytes:
    """A Type 3 font whose glyph shows the same glyph twenty times."""
    font = (
        b"<</Type/Font/Subtype/Type3/FontBBox[0 0 1 1]/FontMatrix[1 0 0 1 0 0]/FirstChar 97"
        b"/LastChar 97/Widths[1]/Encoding<</Differences[97/a]>>/CharProcs<</a 7 0 R>>"
        b"/Resources<</Font<</T 6 0 R>>>>>>"
    )
    glyph = stream(b"", b"1 0 d0 BT /T 1 Tf (aaaaaaaaaaaaaaaaaaaa) Tj ET")
    return one_page(b"BT /T 12 Tf (aaaa) Tj ET", b"/Font<</T 6 0 R>>", font, glyph)


def map_of_all_characters() -> bytes:
    """A font whose map to Unicode names 65,536 codes ten times."""
    ranges = b"".join(b"<%04x><%04x><0041>\n" % (code, code) for code in range(65_536))
    cmap = _deflated(b"", b"100 beginbfrange\n" + ranges + b"endbfrange\n", 10)
    font = b"<</Type/Font/Subtype/TrueType/BaseFont/Helvetica/ToUnicode 7 0 R>>"
    return one_page(prose_stream(), b"/Font<</F1 6 0 R>>", font, cmap)


def notes_by_the_thousand() -> bytes:
    """A page with 100,000 annotations that each have an appearance."""
    look = stream(b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]", b"0 0 9 9 re f")
    note = b"<</Type/Annot/Subtype/Square/Rect[0 0 9 9]/AP<</N 6 0 R>>>>"
    page = one_page(prose_stream(), b"", look, note)
    return page.replace(b"/Type/Page/", b"/Annots[%s]/Type/Page/" % (b"7 0 R " * 100_000))


def outline_in_a_circle() -> bytes:
    """An outline whose entries follow each other in a circle."""
    page = one_page(
        prose_stream(), b"",
        b"<</Type/Outlines/First 7 0 R/Last 7 0 R/Count 1>>",
        b"<</Title(a)/Parent 6 0 R/Next 7 0 R/First 6 0 R/Dest[3 0 R/Fit]>>",
    )  # fmt: skip
    return page.replace(b"/Type/Catalog/", b"/Outlines 6 0 R/Type/Catalog/")


def png_of_gigapixels() -> bytes:
    """A PNG of 50,000 by 50,000 pixels of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(9)
    row = bytes(1 + 50_000 * 3)
    pixels = b"".join(packer.compress(row) for _ in range(2000)) + packer.flush()
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def png_with_text_of_a_gigabyte() -> bytes:
    """A small PNG with compressed texts that unpack to 1 GiB."""
    picture = io.BytesIO()
    Image.new("L", (200, 100), 255).save(picture, "PNG")
    packed = zlib.compress(bytes(64 * MIB), 9)
    body = b"zTXtComment\x00\x00" + packed
    text = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    whole = picture.getvalue()
    return whole[:33] + text * 16 + whole[33:]


def tiff_of_thousands_of_frames() -> bytes:
    """A TIFF of 1,000 small frames."""
    frames = [Image.new("1", (32, 32), number % 2) for number in range(1000)]
    out = io.BytesIO()
    frames[0].save(out, "TIFF", save_all=True, append_images=frames[1:], compression="group4")
    return out.getvalue()


def tiff_in_a_circle() -> bytes:
    """A TIFF whose last directory names the first as the next."""
    out = io.BytesIO()
    Image.new("L", (32, 32), 200).save(out, "TIFF")
    data = bytearray(out.getvalue())
    first = struct.unpack_from("<I", data, 4)[0]
    entries = struct.unpack_from("<H", data, first)[0]
    struct.pack_into("<I", data, first + 2 + 12 * entries, first)
    return bytes(data)


def file_with_long_names() -> bytes:
    """A PDF whose fonts, keys and title are megabytes long."""
    name = b"/" + b"N" * (4 * MIB)
    page = one_page(prose_stream(), b"")
    return page.replace(b"/BaseFont/Helvetica", b"/BaseFont" + name)


def attachment_of_a_gigabyte() -> bytes:
    """A page with an attached file that unpacks to 1 GiB."""
    with pymupdf.open() as document:
        document.new_page().insert_text((72, 90), "See the attached file.")
        document.embfile_add("zeros", bytes(64 * MIB))
        return bytes(document.tobytes(deflate=True, garbage=0))


KINDS: Mapping[str, Callable[[], bytes]] = MappingProxyType(
    {
        f"{make.__name__}.{suffix}": make
        for suffix, makers in {
            "pdf": (
                endless_page, undrawable_page, content_of_a_gigabyte, content_compressed_twice,
                picture_of_gigapixels, bilevel_picture_of_gigapixels, many_pictures_on_a_page,
                page_of_kilometres, page_of_a_hair, count_of_a_billion, page_tree_in_a_circle,
                one_page_shown_often, arrays_in_arrays, page_tree_of_depth,
                table_of_a_billion_objects, previous_table_in_a_circle, soft_masks_in_soft_masks,
                shading_of_samples, words_by_the_million, paths_by_the_million,
                glyph_that_draws_itself, map_of_all_characters, notes_by_the_thousand,
                outline_in_a_circle, file_with_long_names, attachment_of_a_gigabyte,
            ),
            "png": (png_of_gigapixels, png_with_text_of_a_gigabyte),
            "tiff": (tiff_of_thousands_of_frames, tiff_in_a_circle),
        }.items()
        for make in makers
    }
)  # fmt: skip
