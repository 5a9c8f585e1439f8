"""The README and the compose file say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from rag_service import errors
from rag_service.cli.settings_table import settings_table

ROOT = Path(__file__).parents[2]


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
