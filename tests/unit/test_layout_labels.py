"""What is done with each of the 25 labels, by default and by settings."""

from __future__ import annotations

import pytest

from rag_service.config.loader import load_settings
from rag_service.errors import ConfigurationError
from rag_service.layout.labels import LABELS, task_of
from rag_service.layout.page_layout import Task

DEFAULTS = {
    Task.TABLE: {"table"},
    Task.FORMULA: {"display_formula", "inline_formula"},
    Task.PICTURE: {"chart", "image"},
    Task.DROP: {
        "header", "footer", "number", "footnote", "aside_text", "reference", "header_image",
        "footer_image",
    },
    Task.TEXT: {
        "abstract", "algorithm", "content", "doc_title", "figure_title", "formula_number",
        "paragraph_title", "reference_content", "seal", "text", "vertical_text", "vision_footnote",
    },
}  # fmt: skip


def test_the_defaults_cover_all_labels_as_the_sdk_has_them() -> None:
    settings = load_settings().layout
    found = {task: {label for label in LABELS if task_of(label, settings) is task} for task in Task}
    assert found == DEFAULTS
    assert len(LABELS) == len(set(LABELS)) == 25


def test_footnotes_are_read_if_the_settings_do_not_drop_them(monkeypatch) -> None:
    monkeypatch.setenv("RAG_SERVICE_LAYOUT_DROP", "header,footer")
    settings = load_settings().layout
    assert task_of("footnote", settings) is Task.TEXT
    assert task_of("header", settings) is Task.DROP


@pytest.mark.parametrize(
    ("value", "complaint"),
    [("headline", "'headline' is not a label"), ("table", "table may be in only one")],
)
def test_an_unknown_label_and_one_with_two_tasks_stop_the_start(
    monkeypatch, value, complaint
) -> None:
    monkeypatch.setenv("RAG_SERVICE_LAYOUT_DROP", value)
    with pytest.raises(ConfigurationError, match=complaint):
        load_settings()
