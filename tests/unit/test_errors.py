"""The error tree: every class can be pickled, and every code has one meaning."""

import copy
import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service import errors
from rag_service.errors import DocumentError, PageError, RagServiceError, RequestError

CLASSES = sorted(
    (c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, RagServiceError)),
    key=lambda c: c.__name__,
)
# Bases, signals and start-up errors never end a document, a page or a request.
CODED = [
    c for c in CLASSES
    if issubclass(c, (DocumentError, PageError, RequestError))
    and c not in (DocumentError, PageError, RequestError)
]  # fmt: skip
DOCUMENTED = {
    "unsupported_type", "empty_file", "corrupt_pdf", "empty_pdf", "encrypted_pdf",
    "wrong_password", "too_large", "too_many_pages", "page_too_large", "page_timeout",
    "page_unrenderable", "payload_too_large", "layout_unavailable", "ocr_unavailable",
    "ocr_failed", "ocr_rejected", "ocr_empty", "ocr_repetition", "pages_failed",
    "remote_job_failed",
    "remote_job_timed_out", "remote_job_expired", "remote_job_cancelled",
    "remote_result_missing", "document_timeout", "worker_crashed", "source_missing",
    "storage_unavailable", "database_unavailable", "cancelled", "internal",
    "unauthorized", "forbidden", "not_found", "method_not_allowed", "invalid_options",
    "options_differ", "already_active", "backlog_full", "busy",
}  # fmt: skip
RETRYABLE = {
    "layout_unavailable", "ocr_unavailable", "remote_job_failed", "remote_job_timed_out",
    "remote_job_expired", "remote_job_cancelled", "remote_result_missing",
    "storage_unavailable", "database_unavailable", "ocr_failed", "backlog_full",
    "busy",
}  # fmt: skip


def ids(cls):
    return cls.__name__


@pytest.mark.parametrize("cls", CLASSES, ids=ids)
@given(message=st.text(), page=st.none() | st.integers(1, 10**6))
def test_an_error_survives_pickling(cls, message, page):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(cls(message, page=page), protocol))
        original = cls(message, page=page)
        assert type(back) is cls
        assert (back.message, back.page, str(back)) == (original.message, page, str(original))
        assert (back.code, back.retryable) == (cls.code, cls.retryable)


@pytest.mark.parametrize("cls", CLASSES, ids=ids)
def test_an_error_survives_copying_and_pickling_twice(cls):
    error = cls("the sentence", page=7)
    twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(copy.copy(error)))))
    assert (twice.message, twice.page) == ("the sentence", 7)


@pytest.mark.parametrize("cls", CLASSES, ids=ids)
def test_every_class_has_its_own_default_message(cls):
    assert "default_message" in vars(cls)
    sentence = str(cls())
    assert sentence == cls.default_message
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_the_codes_are_exactly_the_documented_ones():
    assert {cls.code for cls in CODED} == DOCUMENTED


@pytest.mark.parametrize("cls", CODED, ids=ids)
def test_the_retryable_codes_are_the_documented_ones(cls):
    assert cls.retryable == (cls.code in RETRYABLE)


@pytest.mark.parametrize("base", [DocumentError, PageError, RequestError], ids=ids)
def test_a_code_belongs_to_one_class_of_each_kind(base):
    # A subclass says more of the same outcome.
    codes = [cls.code for cls in CODED if issubclass(cls, base) and cls.__base__.code != cls.code]
    assert sorted(codes) == sorted(set(codes))


def test_http_codes_and_document_codes_are_disjoint():
    http = {cls.code for cls in CODED if issubclass(cls, RequestError)}
    others = {cls.code for cls in CODED if not issubclass(cls, RequestError)}
    assert http
    assert others
    assert not http & others


def test_the_outcome_codes_are_those_of_documents_and_pages():
    endings = {cls.code for cls in CODED if not issubclass(cls, RequestError)}
    assert errors.outcome_codes() == endings
    for code in endings:
        assert errors.require_outcome_code(code) == code


@pytest.mark.parametrize(
    ("typed", "message"),
    [("ocr_unavailabel", "ocr_unavailable"), ("pages-failed", "pages_failed"), ("xyz", "internal"),
     ("not_found", "Valid codes|Did you mean")],
)  # fmt: skip
def test_an_unknown_code_is_refused_with_similar_ones(typed, message):
    with pytest.raises(errors.InvalidOptions, match=message) as caught:
        errors.require_outcome_code(typed)
    assert typed in str(caught.value)
