"""The README and the guides say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rag_service import errors
from rag_service.api import health_routes
from rag_service.cli.settings_table import settings_table
from rag_service.config.loader import unknown_variables
from rag_service.knowledgebase.views import PageStatus
from rag_service.states import PostReason, RunState, WaitingFor

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))


def test_the_settings_table_of_the_readme_is_the_generated_one() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"<!-- settings -->\n(.*?)<!-- /settings -->", readme, re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == settings_table().strip(), "run `make readme`"


def test_every_error_code_stands_in_the_operators_guide() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    codes = {
        cls.code
        for cls in vars(errors).values()
        if isinstance(cls, type)
        and issubclass(cls, errors.DocumentError | errors.PageError | errors.RequestError)
    }
    assert {code for code in codes if f"`{code}`" not in guide} == set()


def test_every_word_of_a_document_and_a_page_stands_in_the_operators_guide() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    words = {str(word) for kind in (RunState, PageStatus, WaitingFor) for word in kind}
    assert {
        word for word in words if f"`{word}`" not in guide and f": {word}`" not in guide
    } == set()


def test_every_name_of_degraded_stands_in_the_operators_guide_with_its_way_out() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    listed = (health_routes.ready.__doc__ or "").partition("amiss:")[2]
    names = re.findall(r"\w+", listed)
    assert len(names) >= 8
    table = guide.partition("## Degraded")[2].partition("\n## ")[0]
    assert {name for name in names if f"`{name}`" not in table} == set()


def test_every_reason_of_a_post_stands_in_the_guide_of_runpod() -> None:
    guide = (ROOT / "docs" / "runpod.md").read_text()
    assert {reason for reason in PostReason if f"| `{reason}` |" not in guide} == set()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_variable_that_a_guide_names_is_one(guide: Path) -> None:
    named = set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", guide.read_text()))
    assert unknown_variables(dict.fromkeys(named, "")) == []
    script = (ROOT / "workers" / "runpod_handler" / "start.sh").read_text()
    of_the_image = {name for name in named if name.startswith(("SGLANG_", "HF_"))}
    assert {name for name in of_the_image if name not in script} == set()


@pytest.mark.parametrize("guide", [ROOT / "README.md", *GUIDES], ids=lambda guide: guide.name)
def test_every_link_of_a_guide_leads_somewhere(guide: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", guide.read_text()):
        name, _, anchor = target.partition("#")
        file = guide.parent / name if name else guide
        assert file.exists(), target
        heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(_anchor, heads), target


def _anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
