"""Documents of any size as jobs that RunPod accepts, checked as the handler receives them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymupdf
import pytest
from PIL import Image

from rag_service.config.loader import load_settings
from rag_service.config.options import Settings
from rag_service.pdf.session import PdfSession
from rag_service.runpod.job_body import Envelope
from rag_service.runpod.job_format import InlineDocument, JobInput
from rag_service.runpod.payload import PageRefused, Payload, PayloadMaker
from rag_service.states import OcrMode
from tests.fakes import heavy_scans, pdf_samples

PDF = "application/pdf"
LIMIT = 9_500_000
NOWHERE = "/nonexistent"


def settings(*, shrink: bool = True, **runpod: int) -> Settings:
    base = load_settings()
    return base.model_copy(
        update={
            "pdf": base.pdf.model_copy(update={"downsample_oversized": shrink}),
            "runpod": base.runpod.model_copy(update=runpod),
        }
    )


def envelope(pages: Sequence[int]) -> Envelope:
    return Envelope(f"run:o:{list(pages)}", 150, "page", 32768, 60_000, 86_400_000, "http://hook")


def made(
    source: Path, pages: Sequence[int], media_type: str = PDF, **changes: Any
) -> list[Payload | PageRefused]:
    chosen = settings(**changes)

    async def work() -> list[Payload | PageRefused]:
        async with PdfSession(chosen.pdf, 1000) as pdf:
            maker = PayloadMaker(chosen, pdf, source, media_type, "scan ü.pdf")
            return [each async for each in maker.make(pages, envelope)]

    return asyncio.run(work())


@dataclass(frozen=True)
class Received:
    """A job as the handler receives it."""

    pages: list[int]
    encoding: str
    sizes: list[tuple[int, int]]
    page_count: int


def received(payload: Payload, folder: Path) -> Received:
    job = JobInput.model_validate(json.loads(payload.body)["input"])
    assert isinstance(job.document, InlineDocument)
    assert job.request_key == f"run:o:{job.pages}"
    assert tuple(job.pages) == payload.pages
    data = base64.b64decode(job.document.data, validate=True)
    if job.document.encoding == "zip+base64":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            [name] = archive.namelist()
            data = archive.read(name)
    file = folder / "received.pdf"
    file.write_bytes(data)
    with pymupdf.open(file) as document:
        page_count = document.page_count
    return Received(job.pages, job.document.encoding, heavy_scans.picture_sizes(file), page_count)


def codes(payload: Payload | PageRefused) -> list[str]:
    assert isinstance(payload, Payload)
    return [warning.code for warning in payload.warnings]


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 39 MB on 8 pages."""
    path = heavy_scans.scan(tmp_path_factory.mktemp("heavy") / "heavy.pdf", 8)
    assert 36_000_000 < path.stat().st_size < 44_000_000, path.stat().st_size
    return path


@pytest.mark.parametrize("with_ghostscript", [True, False])
def test_a_heavy_scan_is_shrunk_and_split(
    heavy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_ghostscript: bool
) -> None:
    if with_ghostscript:
        heavy_scans.need_ghostscript()
    else:
        monkeypatch.setenv("PATH", NOWHERE)
    before = hashlib.sha256(heavy.read_bytes()).digest()
    payloads = made(heavy, range(1, 9))
    assert len(payloads) > 1
    assert [page for each in payloads for page in each.pages] == list(range(1, 9))
    for payload in payloads:
        assert len(payload.body) <= LIMIT
        job = received(payload, tmp_path)
        assert job.sizes == [(1275, 1650)] * len(job.pages)
        wanted = ["shrunk_150"] if with_ghostscript else ["shrunk_150", "shrinker_fallback"]
        assert codes(payload) == wanted
    assert hashlib.sha256(heavy.read_bytes()).digest() == before


def test_pages_that_fit_are_sent_unchanged_and_no_others(tmp_path: Path) -> None:
    source = heavy_scans.scan(tmp_path / "light.pdf", 9, dpi=200, quality=50)
    payloads = made(source, [2, 3, 5, 8, 9], workers=1)
    [payload] = payloads
    job = received(payload, tmp_path)
    assert (job.pages, job.encoding, job.page_count) == ([2, 3, 5, 8, 9], "base64", 5)
    assert job.sizes == [(1700, 2200)] * 5
    assert codes(payload) == []


def test_text_comes_from_the_original_even_if_pages_are_shrunk(tmp_path: Path) -> None:
    source = pdf_samples.text_document(tmp_path / "text.pdf", 3)
    with pymupdf.open(source) as document:
        for page in document:
            page.insert_image((72, 500, 540, 780), stream=heavy_scans.picture("X", 300))
        document.saveIncr()

    async def work() -> list[str]:
        chosen = settings(max_body_bytes=700_000)
        async with PdfSession(chosen.pdf, 100) as pdf:
            await pdf.open(source, PDF)
            maker = PayloadMaker(chosen, pdf, source, PDF, "a.pdf")
            payloads = [each async for each in maker.make([1, 2, 3], envelope)]
            assert any("shrunk_150" in codes(payload) for payload in payloads)
            return [page.markdown async for page in pdf.plan(OcrMode.AUTO, [1, 2, 3])]

    for number, text in enumerate(asyncio.run(work()), start=1):
        assert f"This is page {number} of the whole document." in text
        assert pdf_samples.PROSE.split(",")[0] in " ".join(text.split())


def test_with_shrinking_off_pages_are_sent_unchanged(heavy: Path, tmp_path: Path) -> None:
    payloads = made(heavy, range(1, 9), shrink=False)
    assert [page for each in payloads for page in each.pages] == list(range(1, 9))
    for payload in payloads:
        assert len(payload.body) <= LIMIT
        job = received(payload, tmp_path)
        assert job.sizes == [(2550, 3300)] * len(job.pages)
        assert codes(payload) == []


def test_a_compressible_document_is_zipped_before_it_is_split(tmp_path: Path) -> None:
    source = tmp_path / "raw.pdf"
    flat = pdf_samples.stream(
        b"/Type/XObject/Subtype/Image/Width 2000/Height 1000/ColorSpace/DeviceGray"
        b"/BitsPerComponent 8",
        bytes(2_000_000),
    )
    source.write_bytes(
        pdf_samples.one_page(b"q 600 0 0 300 0 0 cm /I Do Q", b"/XObject<</I 6 0 R>>", flat)
    )
    [payload] = made(source, [1], shrink=False, max_body_bytes=500_000)
    job = received(payload, tmp_path)
    assert (job.encoding, job.sizes) == ("zip+base64", [(2000, 1000)])
    assert len(payload.body) < 100_000


def test_a_single_page_is_made_coarser_step_by_step_and_never_below_100_dpi(
    heavy: Path, tmp_path: Path
) -> None:
    heavy_scans.need_ghostscript()
    wanted = [
        (1_500_000, "shrunk_150", 1275, "150 DPI"),
        (130_000, "shrunk_100", 850, "Pictures were shrunk to 100 DPI"),
        (70_000, "shrunk_100", 850, "as a JPEG of quality"),
    ]
    for limit, code, width, message in wanted:
        [payload] = made(heavy, [4], max_body_bytes=limit)
        assert isinstance(payload, Payload)
        assert len(payload.body) <= limit
        assert received(payload, tmp_path).sizes == [(width, width * 22 // 17)]
        [warning] = payload.warnings
        assert (warning.code, message in warning.message) == (code, True)
    [refused] = made(heavy, [4], max_body_bytes=10_000)
    assert isinstance(refused, PageRefused)
    assert (refused.page, refused.error.code) == (4, "payload_too_large")
    assert "runpod.max_body_bytes is 10000" in refused.error.message


def test_a_page_too_large_for_any_job_fails_alone(tmp_path: Path) -> None:
    source = tmp_path / "mixed.pdf"
    with pymupdf.open() as document:
        for number in range(1, 8):
            page = document.new_page(width=612, height=792)
            quality = 97 if number == 4 else 20
            picture = heavy_scans.picture(f"Page {number}", 100, quality, noise=number // 4 * 40)
            page.insert_image(page.rect, stream=picture)
        document.save(source)
    outcomes = made(source, range(1, 8), shrink=False, workers=1, max_body_bytes=400_000)
    [refused] = [each for each in outcomes if isinstance(each, PageRefused)]
    assert (refused.page, refused.error.code) == (4, "payload_too_large")
    assert "pdf.downsample_oversized" in refused.error.message
    order = [p for each in outcomes for p in (each.pages if isinstance(each, Payload) else [4])]
    assert order == list(range(1, 8))


def test_a_picture_is_sent_as_a_pdf_page(tmp_path: Path) -> None:
    source = tmp_path / "photo.jpg"
    source.write_bytes(heavy_scans.picture("Photo", 300))
    with Image.open(source) as image:
        image.save(source, dpi=(300, 300), quality=95)
    [payload] = made(source, [1], "image/jpeg")
    assert received(payload, tmp_path).sizes == [(1275, 1650)]
    assert codes(payload) == []


def test_a_damaged_frame_among_good_ones_fails_alone(tmp_path: Path) -> None:
    source = tmp_path / "fax.tif"
    frames = [Image.effect_noise((400, 300), 60) for _ in range(5)]
    frames[0].save(source, save_all=True, append_images=frames[1:], compression="tiff_lzw")
    with Image.open(source) as image:
        image.seek(2)
        offset = image.tag_v2[273][0]
    content = bytearray(source.read_bytes())
    content[offset : offset + 300] = os.urandom(300)
    source.write_bytes(content)
    outcomes = made(source, [1, 2, 3, 4, 5], "image/tiff")
    [refused] = [each for each in outcomes if isinstance(each, PageRefused)]
    assert (refused.page, refused.error.code) == (3, "page_unrenderable")
    good = [received(each, tmp_path) for each in outcomes if isinstance(each, Payload)]
    assert [(job.pages, job.page_count) for job in good] == [([1, 2], 2), ([4, 5], 2)]


def test_no_temporary_file_remains(
    heavy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert made(heavy, [1, 2], shrink=False)
    assert list(folder.iterdir()) == []
