"""The built wheel works outside the checkout, with its defaults and migrations inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pymupdf
import pytest

from rag_service.config.option_list import PREFIXES

ROOT = Path(__file__).parents[2]
SETTINGS = (*PREFIXES, "DATABASE_URL", "REDIS_URL")
PROSE = "The goods were delivered to the door in the evening, and all of them were accepted there."

pytestmark = pytest.mark.timeout(300)


def environment(**changes: str) -> dict[str, str]:
    """The environment without settings, and without what hides the checkout's own modules."""
    dropped = (*SETTINGS, "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | changes


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel, built without a warning."""
    if find_spec("build") is None or find_spec("setuptools") is None:
        if os.environ.get("CI"):
            pytest.fail("build or setuptools is missing; make test installs them")
        pytest.skip("build or setuptools is not installed")
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"],
        cwd=source, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    assert [line for line in printed.splitlines() if "warning" in line.lower()] == []
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the wheel and the dependencies of this environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (wheel,) = built.glob("*.whl")
    python = folder / "bin" / "python"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "-q", "--python", python),
            *("install", "--no-index", "--no-deps", wheel),
        ],
        env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    (site,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    # Lines of a .pth file come after the environment's own packages, and their .pth files do not
    # count: a checkout that is installed as editable is not found.
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    return folder / "bin"


def test_the_wheel_contains_packages_defaults_and_migrations_only(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        defaults = archive.read("rag_service/config/config.yaml")
    assert defaults == (ROOT / "config.yaml").read_bytes()
    tops = {PurePosixPath(name).parts[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "rag_service", "workers", "migrations",
    }  # fmt: skip
    migrations = {
        f"migrations/versions/{f.name}" for f in (ROOT / "migrations/versions").glob("0*")
    }
    assert migrations < set(names)
    assert {"rag_service/py.typed", "migrations/script.py.mako"} < set(names)


def test_the_sdist_contains_the_defaults_as_a_file(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        folder = archive.getnames()[0].partition("/")[0]
        defaults = archive.getmember(f"{folder}/rag_service/config/config.yaml")
        assert defaults.isreg()
        assert defaults.size == (ROOT / "config.yaml").stat().st_size


def test_run_works_from_the_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    document = pymupdf.open()
    page = document.new_page()
    for line in range(12):
        page.insert_text((72, 90 + 16 * line), PROSE)
    document.save(work / "contract.pdf")
    env = environment(HOME=str(home), PATH=f"{installed}:{os.environ['PATH']}")
    where = "import rag_service, workers; print(rag_service.__file__, workers.__file__)"
    found = subprocess.run(
        [installed / "python", "-c", where],
        cwd=work, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all(str(installed.parent) in path for path in found.stdout.split())
    done = subprocess.run(
        [installed / "rag-service", "run", "contract.pdf", "--ocr", "off"],
        cwd=work, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert PROSE in " ".join(done.stdout.split())
