"""Two shrinkers behind one function: whatever they do, the result is a correct file."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pymupdf
import pytest
from PIL import Image

from rag_service.config.loader import load_settings
from rag_service.pdf import shrink as shrinking
from rag_service.pdf.session import PdfSession
from rag_service.pdf.shrink import Shrinker, ShrinkResult
from tests.fakes import heavy_scans, pdf_samples

NOWHERE = "/nonexistent"
LIMIT = 60.0


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heavy_scans.scan(tmp_path_factory.mktemp("scan") / "scan.pdf", 2)


def shrunk(source: Path, folder: Path, dpi: int = 150, limit: float = LIMIT) -> ShrinkResult:
    async def work() -> ShrinkResult:
        async with PdfSession(load_settings().pdf, 100) as pdf:
            return await shrinking.shrink(pdf, source, dpi, folder / "shrunk.pdf", limit)

    return asyncio.run(work())


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("dpi", "width"), [(150, 1275), (100, 850)])
def test_ghostscript_reduces_pictures_to_the_wanted_dpi(
    scan: Path, tmp_path: Path, dpi: int, width: int
) -> None:
    heavy_scans.need_ghostscript()
    result = shrunk(scan, tmp_path, dpi)
    assert (result.shrinker, result.fell_back, result.reason) == (Shrinker.GHOSTSCRIPT, False, "")
    assert [size[0] for size in heavy_scans.picture_sizes(result.path)] == [width] * 2
    assert result.path.stat().st_size < scan.stat().st_size / 3


@pytest.mark.parametrize(("dpi", "width"), [(150, 1275), (100, 850)])
def test_without_ghostscript_pymupdf_does_the_same(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dpi: int, width: int
) -> None:
    monkeypatch.setenv("PATH", NOWHERE)
    result = shrunk(scan, tmp_path, dpi)
    assert (result.shrinker, result.fell_back) == (Shrinker.PYMUPDF, True)
    assert "not installed" in result.reason
    assert [size[0] for size in heavy_scans.picture_sizes(result.path)] == [width] * 2
    assert result.path.stat().st_size < scan.stat().st_size / 3
    assert shrinking.shrinkers_available() == (Shrinker.PYMUPDF,)


def blank_pages(path: Path, pages: int, ballast: int = 0) -> Path:
    with pymupdf.open() as document:
        for _ in range(pages):
            document.new_page(width=612, height=792)
        if ballast:
            document.embfile_add("ballast", os.urandom(ballast))
        document.save(path)
    return path


BALLAST = 60_000


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        (['/bin/cat {stub} > "$out"'], "only"),
        (['/bin/cat {blank} > "$out"'], "lost what page 1 shows"),
        (['/bin/cat {short} > "$out"'], "1 pages instead of 2"),
        (['/bin/cat {turned} > "$out"'], "lost what page 1 shows"),
        (['/bin/cat {other} > "$out"'], "lost what page 2 shows"),
        (['/bin/cat {good} > "$out"', "echo \"Couldn't initialise file.\" >&2"], "initialise"),
        (['/bin/cat {good} > "$out"', "echo No pages will be processed"], "no pages"),
        (['/bin/cat {good} > "$out"', "exit 1"], "status 1"),
        (["kill -SEGV $$"], "status -11"),
        (["exit 0"], "wrote no file"),
        (['echo "not a PDF" > "$out"'], "only"),
        (['/bin/cat /dev/zero > "$out"', "exit $?"], "status"),
    ],
    ids=["stub", "blank", "short", "turned", "other", "marker", "marker-stdout", "status", "crash",
         "no-file", "no-pdf", "endless-file"],
)  # fmt: skip
def test_a_wrong_result_of_ghostscript_is_detected(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[str], reason: str
) -> None:
    files = {
        "stub": blank_pages(tmp_path / "stub.pdf", 1),
        "blank": blank_pages(tmp_path / "blank.pdf", 2, BALLAST),
        "short": blank_pages(tmp_path / "short.pdf", 1, BALLAST),
        "turned": turned(scan, tmp_path / "turned.pdf"),
        "other": swapped(scan, tmp_path / "other.pdf"),
        "good": scan,
    }
    stub = [command.format(**files) if "{" in command else command for command in commands]
    folder = heavy_scans.stub_ghostscript(tmp_path / "bin", stub)
    monkeypatch.setenv("PATH", str(folder))
    result = shrunk(scan, tmp_path)
    assert (result.shrinker, result.fell_back) == (Shrinker.PYMUPDF, True)
    assert reason in result.reason
    assert [size[0] for size in heavy_scans.picture_sizes(result.path)] == [1275] * 2


def turned(source: Path, target: Path) -> Path:
    with pymupdf.open(source) as document:
        for page in document:
            page.set_rotation(90)
        document.save(target)
    return target


def swapped(source: Path, target: Path) -> Path:
    """The second page shows as much as before, but something else."""
    with pymupdf.open(source) as document:
        page = document[1]
        page.replace_image(
            page.get_images()[0][0], stream=heavy_scans.picture("\n\n\n\nanother", 300)
        )
        document.save(target)
    return target


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "CMYK"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_pymupdf_keeps_what_pictures_of_every_kind_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, kind: str
) -> None:
    """MuPDF's own rewrite of grey pictures with a profile leaves nothing legible."""
    if (kind, mode) in {("JPEG", "LA"), ("JPEG", "P"), ("PNG", "CMYK")}:
        pytest.skip("there are no such pictures")
    monkeypatch.setenv("PATH", NOWHERE)
    source = tmp_path / "source.pdf"
    with Image.open(io.BytesIO(heavy_scans.picture("Legible", 200, noise=40))) as image:
        picture = io.BytesIO()
        image.convert(mode).save(picture, kind)
    with pymupdf.open() as document:
        page = document.new_page(width=612, height=792)
        page.insert_image(page.rect, stream=picture.getvalue())
        document.save(source)
    result = shrunk(source, tmp_path)
    assert result.shrinker is Shrinker.PYMUPDF, result.reason


def test_a_ghostscript_that_hangs_is_killed_with_its_children(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    folder = heavy_scans.stub_ghostscript(
        tmp_path / "bin", ["/bin/sleep 600 &", f"echo $$ $! > {pids}", "wait"]
    )
    monkeypatch.setenv("PATH", str(folder))
    result = shrunk(scan, tmp_path, limit=3)
    assert "longer than 3 s" in result.reason
    assert result.fell_back
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_ghostscript_dies_with_its_parent(tmp_path: Path, scan: Path) -> None:
    pids = tmp_path / "pids"
    folder = heavy_scans.stub_ghostscript(
        tmp_path / "bin", [f"echo $$ > {pids}", "exec /bin/sleep 600"]
    )
    work = (
        "import asyncio, pathlib, sys; from rag_service.pdf import ghostscript;"
        "asyncio.run(ghostscript.rewrite(*map(pathlib.Path, sys.argv[1:2]), 150,"
        " pathlib.Path(sys.argv[2]), 600, 1024))"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", work, str(scan), str(tmp_path / "out.pdf")],
        env={**os.environ, "PATH": str(folder)},
    )
    try:
        while not (pids.exists() and pids.read_text().strip()):
            assert owner.poll() is None
            time.sleep(0.05)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert is_gone(int(pids.read_text()))


def locked(path: Path) -> bytes:
    with pymupdf.open() as document:
        page = document.new_page()
        page.insert_image(page.rect, stream=heavy_scans.picture("Secret", 150))
        document.save(path, encryption=pymupdf.PDF_ENCRYPT_AES_256, user_pw="u", owner_pw="o")
    return path.read_bytes()


@pytest.mark.parametrize("damage", ["empty", "stub", "truncated", "noise", "password"])
@pytest.mark.parametrize("with_ghostscript", [True, False])
def test_a_file_that_cannot_be_opened_is_returned_unchanged(
    scan: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
    with_ghostscript: bool,
) -> None:
    if with_ghostscript:
        heavy_scans.need_ghostscript()
    else:
        monkeypatch.setenv("PATH", NOWHERE)
    content = {
        "empty": b"",
        "stub": b"%PDF-1.7\n" + b"1 0 obj\n" * 4,
        "truncated": b"%PDF-1.7\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n" + b"x" * 90_000,
        "noise": b"%PDF-1.4\n" + os.urandom(90_000),
        "password": locked(tmp_path / "locked.pdf"),
    }[damage]
    source = tmp_path / "source.pdf"
    source.write_bytes(content)
    result = shrunk(source, tmp_path)
    assert (result.path, result.shrinker, result.fell_back) == (source, None, True)
    assert result.reason
    assert source.read_bytes() == content


def test_a_file_that_would_grow_is_returned_unchanged(tmp_path: Path) -> None:
    heavy_scans.need_ghostscript()
    source = pdf_samples.text_document(tmp_path / "text.pdf", 1)
    result = shrunk(source, tmp_path)
    assert (result.path, result.shrinker, result.fell_back) == (source, None, False)
    assert "smaller" in result.reason


def test_a_missing_file_raises_no_error(tmp_path: Path) -> None:
    result = shrunk(tmp_path / "missing.pdf", tmp_path)
    assert (result.path, result.shrinker) == (tmp_path / "missing.pdf", None)
