"""Misspelled settings: which are noticed, and which names are proposed for them."""

from __future__ import annotations

import logging
import re

import pytest

from rag_service.config.explanations import near_keys, near_variables
from rag_service.config.loader import load_settings, warn_of_unknown_variables
from rag_service.config.option_list import options
from rag_service.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OCR_WORKER_CONCURENCY", "OCR_WORKER_CONCURRENCY"),
        ("OCR_CONCURRENCY", "OCR_WORKER_CONCURRENCY"),
        ("GLMOCR_BASEURL", "GLMOCR_BASE_URL"),
        ("GLMOCR_URL", "GLMOCR_BASE_URL"),
        ("GLMOCR_KEY", "GLMOCR_API_KEY"),
        ("RUNPOD_KEY", "RUNPOD_API_KEY"),
        ("RUNPOD_ENDPOINT", "RUNPOD_ENDPOINT_ID"),
        ("RAG_SERVICE_DATADIR", "RAG_SERVICE_DATA_DIR"),
        ("RAG_SERVICE_OCR_DPI_FILE", "RAG_SERVICE_OCR_DPI"),
        ("RAG_SERVICE_MAX_BYTES", "RAG_SERVICE_LIMITS_MAX_BYTES"),
        ("RAG_SERVICE_BACKLOG", "RAG_SERVICE_LIMITS_MAX_BACKLOG"),
        ("RAG_SERVICE_OCR_MAX_TOKENS", "OCR_MAX_TOKENS"),
        ("RAG_SERVICE_DATABASE_URL", "DATABASE_URL"),
        ("RAG_SERVICE_PREPARE_CONCURRENCY", "RAG_SERVICE_PREPARE_WORKER_CONCURRENCY"),
        ("RAG_SERVICE_PORT", "RAG_SERVICE_API_PORT"),
        ("DATABSE_URL", "DATABASE_URL"),
        ("REDIS_URLS", "REDIS_URL"),
    ],
)
def test_an_unknown_variable_is_warned_about_with_a_suggestion(caplog, name, meant):
    with caplog.at_level(logging.WARNING):
        assert warn_of_unknown_variables({name: "1"}) == [name]
    assert name in caplog.text
    assert f"Did you mean {meant}" in caplog.text


def test_known_and_foreign_variables_are_not_warned_about(caplog):
    known = {name: "1" for option in options() for name in option.variables}
    foreign = {
        "PATH": "1", "MY_RAG_SERVICE_X": "1", "OCRA": "1", "RAG_SERVICE_CONFIG": "x",
        "MYSQL_URL": "1", "DATABASE": "1", "REDIS_HOST": "1",
    }  # fmt: skip
    assert warn_of_unknown_variables(known | foreign) == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ocr:\n  dpy: 300\n", "ocr.dpy: unknown setting. Did you mean ocr.dpi?"),
        ("ocr:\n  base-url: http://x\n", "Did you mean ocr.base_url?"),
        ("ocr:\n  concurrency: 3\n", "Did you mean ocr.worker_concurrency?"),
        ("api:\n  max_pages: 3\n", "Did you mean limits.max_pages?"),
        ("api:\n  apikey: x\n", "Did you mean api.key"),
        ("max_bytes: 3\n", "Did you mean limits.max_bytes"),
        ("database_url: x\n", "Did you mean database.url?"),
        ("server_share: 0.5\n", "Did you mean ocr.server_share?"),
        ("storge:\n  url: s3://x\n", "storge: unknown setting. Did you mean storage?"),
        ("colour: red\n", "colour: unknown setting."),
    ],
)
def test_an_unknown_key_is_refused_with_near_names(monkeypatch, tmp_path, text, sentence):
    (tmp_path / "own.yaml").write_text(text)
    monkeypatch.setenv("RAG_SERVICE_CONFIG", str(tmp_path / "own.yaml"))
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        load_settings()


def test_a_name_that_resembles_nothing_gets_no_proposal():
    assert near_keys("colour") == []
    assert near_variables("RAG_SERVICE_FOO") == []


@pytest.mark.parametrize("option", options(), ids=lambda option: option.key)
def test_one_wrong_letter_still_proposes_the_setting(option):
    wrong = option.key[:-1] + "q"
    assert near_keys(wrong)[0] == option.key
