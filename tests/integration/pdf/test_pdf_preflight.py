"""Opening: a file that cannot be read raises one named error, every other file opens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pymupdf
import pytest
from PIL import Image

from rag_service.config.loader import load_settings
from rag_service.errors import (
    CorruptPdf,
    EmptyFile,
    EmptyPdf,
    EncryptedPdf,
    RagServiceError,
    TooManyPages,
    UnsupportedType,
    WrongPassword,
)
from rag_service.pdf.results import Preflight
from rag_service.pdf.session import PdfSession
from rag_service.states import OcrMode
from tests.fakes import pdf_samples as samples

PDF = "application/pdf"
AES = pymupdf.PDF_ENCRYPT_AES_256


def new_session(max_pages: int = 100) -> PdfSession:
    return PdfSession(load_settings().pdf, max_pages)


def opened(path: Path, password: str | None = None, media_type: str = PDF) -> Preflight:
    async def work() -> Preflight:
        async with new_session() as pdf:
            return await pdf.open(path, media_type, password=password)

    return asyncio.run(work())


def first_page(path: Path, password: str | None = None) -> str:
    async def work() -> str:
        async with new_session() as pdf:
            await pdf.open(path, PDF, password=password)
            (page,) = [page async for page in pdf.plan(OcrMode.AUTO, [1])]
            return page.markdown

    return asyncio.run(work())


def write(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def encrypt(**passwords: str) -> Callable[[Path], None]:
    return lambda path: samples.text_document(path, 1, encryption=AES, **passwords) and None


NO_PAGES = samples.pdf_bytes(b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[]/Count 0>>")
BROKEN_PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40

REFUSED = [
    ("no bytes", write(b""), EmptyFile),
    ("text", write(b"../objects/ab/cd.pdf\n"), UnsupportedType),
    ("a web page", write(b"<html><body>not a pdf</body></html>"), UnsupportedType),
    ("a zip", write(b"PK\x03\x04" + b"\0" * 100), UnsupportedType),
    ("only a header", write(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\nnothing else"), CorruptPdf),
    ("a broken picture", write(BROKEN_PNG), CorruptPdf),
    ("no pages", write(NO_PAGES), EmptyPdf),
    ("a user password", encrypt(user_pw="open-me", owner_pw="own-me"), EncryptedPdf),
    ("an empty owner password", encrypt(user_pw="open-me", owner_pw=""), EncryptedPdf),
]


@pytest.mark.parametrize(
    ("make", "error"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_an_unreadable_file_raises_its_named_error(
    tmp_path: Path, make: Callable[[Path], None], error: type[RagServiceError]
) -> None:
    path = tmp_path / "file.pdf"
    make(path)
    with pytest.raises(error) as caught:
        opened(path)
    assert type(caught.value) is error


def test_a_file_that_only_its_owner_may_change_opens(tmp_path: Path) -> None:
    path = samples.text_document(
        tmp_path / "owner.pdf", 1, encryption=AES, owner_pw="own-me", permissions=0
    )
    assert "This is page 1" in first_page(path)


def test_a_password_opens_or_is_wrong(tmp_path: Path) -> None:
    path = samples.text_document(
        tmp_path / "user.pdf", 1, encryption=AES, user_pw="open-me", owner_pw="own-me"
    )
    with pytest.raises(WrongPassword):
        opened(path, "open-you")
    assert "This is page 1" in first_page(path, "open-me")
    assert "This is page 1" in first_page(path, "own-me")


def test_a_protected_page_that_hangs_is_followed_by_the_next(tmp_path: Path) -> None:
    """The new child opens the file with the password again."""
    plain = samples.joined(tmp_path / "plain.pdf", samples.endless_page(), samples.prose_page())
    locked = tmp_path / "locked.pdf"
    with pymupdf.open(plain) as document:
        document.save(locked, encryption=AES, user_pw="open-me", owner_pw="own-me")
    limits = load_settings().pdf.model_copy(update={"page_time_limit": 1})

    async def work() -> list[str]:
        async with PdfSession(limits, 100) as pdf:
            await pdf.open(locked, PDF, password="open-me")
            pages = [page async for page in pdf.plan(OcrMode.AUTO, [1, 2])]
            return [page.error.code if page.error else page.plan for page in pages]

    assert asyncio.run(work()) == ["page_timeout", "native"]


def test_too_many_pages(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "long.pdf", 4)

    async def work() -> None:
        async with new_session(max_pages=3) as pdf:
            with pytest.raises(TooManyPages, match="4 pages"):
                await pdf.open(path, PDF)

    asyncio.run(work())


def test_a_repaired_file_carries_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "junk.pdf"
    data = samples.prose_page()
    path.write_bytes(b"From: someone\r\n\r\n" + data[: data.index(b"xref")])
    preflight = opened(path)
    assert preflight.repaired
    assert [warning.code for warning in preflight.warnings] == ["repaired_pdf"]
    assert not opened(samples.text_document(tmp_path / "good.pdf", 1)).repaired


def test_the_bytes_decide_and_not_the_declared_type(tmp_path: Path) -> None:
    picture = tmp_path / "scan.pdf"
    Image.new("L", (40, 40)).save(picture, "PNG")
    assert opened(picture).media_type == "image/png"
    document = samples.text_document(tmp_path / "page.png", 1)
    assert opened(document, media_type="image/png").media_type == PDF


def test_decrypt_writes_a_copy_that_needs_no_password(tmp_path: Path) -> None:
    locked = samples.text_document(
        tmp_path / "locked.pdf", 2, encryption=AES, user_pw="open-me", owner_pw="own-me"
    )
    broken = tmp_path / "broken.pdf"
    broken.write_bytes(b"%PDF-1.4\nnothing else")
    copy = tmp_path / "copy.pdf"

    async def work() -> None:
        async with new_session() as pdf:
            with pytest.raises(WrongPassword):
                await pdf.decrypt(locked, "open-you", copy)
            with pytest.raises(EncryptedPdf):
                await pdf.decrypt(locked, "", copy)
            with pytest.raises(CorruptPdf):
                await pdf.decrypt(broken, "open-me", copy)
            assert not copy.exists()
            await pdf.decrypt(locked, "open-me", copy)

    asyncio.run(work())
    assert opened(copy).pages == 2
    assert "This is page 1" in first_page(copy)


def test_an_error_does_not_contain_the_files_path(tmp_path: Path) -> None:
    path = tmp_path / "stored" / "secret-place"
    path.parent.mkdir()
    path.write_bytes(b"%PDF-1.7 and nothing else")

    async def open_it() -> None:
        async with PdfSession(load_settings().pdf, 100) as session:
            await session.open(path, "application/pdf")

    with pytest.raises(CorruptPdf) as raised:
        asyncio.run(open_it())
    assert "secret-place" not in str(raised.value)
    assert str(tmp_path) not in str(raised.value)
    assert "damaged" in str(raised.value)
