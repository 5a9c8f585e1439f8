"""The README and the guides agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rag_service import errors
from rag_service.api import health_routes
from rag_service.cli.settings_table import settings_page
from rag_service.config.loader import unknown_variables
from rag_service.knowledgebase.views import PageStatus
from rag_service.states import PostReason, RunState, WaitingFor

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = sorted(ROOT.glob("*.md"))


def test_the_page_of_settings_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page.strip() == settings_page().strip(), "run `make settings`"


def test_the_readme_shows_at_most_15_of_these_settings() -> None:
    rows = re.findall(r"^\| `.+", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert 0 < len(rows) <= 15
    assert set(rows) <= set(settings_page().splitlines())


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 125


def test_every_path_of_the_code_in_a_guide_exists() -> None:
    path = re.compile(r"`((?:rag_service|workers|migrations|benchmarks)/[\w./]*)`")
    missing = [
        f"{guide.name}: {name}"
        for guide in (*PAGES, *GUIDES)
        for name in path.findall(guide.read_text())
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_every_package_is_in_the_architecture_guide() -> None:
    guide = (ROOT / "docs" / "architecture.md").read_text()
    packages = [
        f"{file.parent.relative_to(ROOT)}/"
        for top in ("rag_service", "workers")
        for file in sorted((ROOT / top).rglob("__init__.py"))
    ]
    assert {package for package in packages if f"`{package}`" not in guide} == set()


def test_every_error_code_is_in_the_operators_guide() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    codes = {
        cls.code
        for cls in vars(errors).values()
        if isinstance(cls, type)
        and issubclass(cls, errors.DocumentError | errors.PageError | errors.RequestError)
    }
    assert {code for code in codes if f"`{code}`" not in guide} == set()


def test_every_status_of_documents_and_pages_is_in_the_operators_guide() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    words = {str(word) for kind in (RunState, PageStatus, WaitingFor) for word in kind}
    assert {
        word for word in words if f"`{word}`" not in guide and f": {word}`" not in guide
    } == set()


def test_every_name_of_degraded_is_in_the_operators_guide() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    listed = (health_routes.ready.__doc__ or "").partition("documents wait:")[2]
    names = re.findall(r"\w+", listed)
    assert len(names) >= 8
    table = guide.partition("## Degraded")[2].partition("\n## ")[0]
    assert {name for name in names if f"`{name}`" not in table} == set()


def test_every_reason_of_a_post_is_in_the_guide_for_runpod() -> None:
    guide = (ROOT / "docs" / "runpod.md").read_text()
    assert {reason for reason in PostReason if f"| `{reason}` |" not in guide} == set()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_variable_in_a_guide_is_a_setting(guide: Path) -> None:
    named = set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", guide.read_text()))
    assert unknown_variables(dict.fromkeys(named, "")) == []
    script = (ROOT / "workers" / "runpod_handler" / "start.sh").read_text()
    of_the_image = {name for name in named if name.startswith(("SGLANG_", "HF_"))}
    assert {name for name in of_the_image if name not in script} == set()


@pytest.mark.parametrize("guide", [*PAGES, *GUIDES], ids=lambda guide: guide.name)
def test_every_link_of_a_guide_has_a_target(guide: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", guide.read_text()):
        name, _, anchor = target.partition("#")
        file = guide.parent / name if name else guide
        assert file.exists(), target
        heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(_anchor, heads), target


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
