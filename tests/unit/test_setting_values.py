"""Values of settings: units of times and sizes, and sentences about values that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.config.loader import load_settings
from rag_service.config.option_list import options
from rag_service.config.units import parse_bytes, parse_mebibytes, parse_seconds
from rag_service.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30), ("5min", 300), ("5m", 300), ("2h", 7200), ("1d", 86400), ("1h30m", 5400),
        ("1h 30m", 5400), ("1.5 h", 5400), ("500ms", 0.5), ("30 S", 30), ("30", "30"),
        ("2.5", "2.5"), ("1e3", "1e3"), (7, 7),
    ],
)  # fmt: skip
def test_a_time_may_have_a_unit(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9), ("2GiB", 2 << 30), ("9.5MB", 9_500_000), ("64 kB", 64_000), ("10M", 10**7),
        ("12", "12"), (12, 12),
    ],
)  # fmt: skip
def test_a_size_may_have_a_unit(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "mib"), [("2GiB", 2048), ("512MiB", 512), ("1GB", 953), (7, 7)])
def test_a_size_in_mib_may_have_another_unit(text, mib):
    assert parse_mebibytes(text) == mib


@pytest.mark.parametrize("text", ["soon", "5mm", "1h x", "-3s", "3 parsecs", "s", "inf", "nan", ""])
def test_a_time_in_another_form_is_refused(text):
    with pytest.raises(ValueError, match="such as 30s"):
        parse_seconds(text)


@given(seconds=st.integers(1, 10**6))
def test_every_unit_of_time_is_the_same_time(seconds):
    assert parse_seconds(f"{seconds}s") == seconds
    assert parse_seconds(f"{seconds // 3600}h {seconds % 3600}s") == seconds
    assert parse_seconds(f"{seconds * 1000}ms") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("RAG_SERVICE_API_PORT", "http", "api.port: must be a whole number"),
        ("RAG_SERVICE_API_PORT", "70000", "api.port: must be at most 65535"),
        ("RAG_SERVICE_API_PORT", "0", "api.port: must be at least 1"),
        ("RAG_SERVICE_OCR_SERVER_SHARE", "0", "ocr.server_share: must be above 0"),
        ("RAG_SERVICE_OCR_SERVER_SHARE", "half", "ocr.server_share: must be a number"),
        ("RAG_SERVICE_PDF_TRUST_HIDDEN_TEXT", "maybe", "must be true or false"),
        ("RAG_SERVICE_LOG_LEVEL", "LOUD", "must be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ("RAG_SERVICE_OCR_LAYOUT", "both", "must be 'page', 'regions' or 'auto'"),
        ("RAG_SERVICE_LIMITS_MAX_BYTES", "big", "must be bytes, or a size such as 500MB"),
        ("RAG_SERVICE_PDF_CHILD_MAX_MIB", "big", "must be MiB, or a size such as 512MiB"),
        ("RAG_SERVICE_OCR_OUTAGE_LIMIT", "inf", "must be seconds, or a time such as 30s"),
        ("RAG_SERVICE_OCR_OUTAGE_LIMIT", "0s", "must be above 0"),
        ("RAG_SERVICE_RETRY_WAITS", "1s, x", "must be seconds, or a time such as 30s"),
    ],
)
def test_a_bad_value_is_refused_in_plain_words(monkeypatch, name, value, sentence):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as refused:
        load_settings()
    assert sentence in refused.value.message
    assert f"(environment: {name})" in refused.value.message


@pytest.mark.parametrize("name", ["RAG_SERVICE_API_KEY", "GLMOCR_API_KEY", "RUNPOD_API_KEY"])
@pytest.mark.parametrize("key", ["schlüssel", " padded", "line\nbreak", "鍵"])
def test_a_key_that_no_header_can_contain_is_refused_without_showing_it(monkeypatch, name, key):
    monkeypatch.setenv(name, key)
    with pytest.raises(ConfigurationError, match="visible ASCII characters") as refused:
        load_settings()
    assert name in refused.value.message
    assert key not in refused.value.message


@pytest.mark.parametrize("option", options(), ids=lambda option: option.key)
def test_no_option_answers_in_the_words_of_a_library(monkeypatch, option):
    monkeypatch.setenv(option.env, "\x01?")
    message = ""
    try:
        load_settings()
    except ConfigurationError as error:
        message = error.message
    for words in ("Input should", "unable to parse", "Value error", "type="):
        assert words not in message


def test_units_work_in_a_file_and_in_the_environment(monkeypatch, tmp_path):
    (tmp_path / "own.yaml").write_text("limits:\n  max_bytes: 2GB\nretry:\n  waits: [1s, 500ms]\n")
    monkeypatch.setenv("RAG_SERVICE_CONFIG", str(tmp_path / "own.yaml"))
    monkeypatch.setenv("RAG_SERVICE_OCR_READ_TIMEOUT", "30min")
    settings = load_settings()
    assert settings.limits.max_bytes == 2 * 10**9
    assert settings.retry.waits == [1.0, 0.5]
    assert settings.ocr.read_timeout == 1800
