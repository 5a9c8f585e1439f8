"""The HTTP client against the real API."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from rag_service.client import Client
from rag_service.config.options import Settings
from rag_service.embedded.folder import free_port as unused_port
from rag_service.errors import (
    AnswerTimeout,
    ConfigurationError,
    CorruptPdf,
    EncryptedPdf,
    InvalidOptions,
    NotFound,
    OptionsDiffer,
    ServiceUnreachable,
    TooLarge,
    Unauthorized,
    UnsupportedType,
    WrongPassword,
)
from rag_service.knowledgebase.views import Action
from rag_service.states import RunState
from tests.conftest import Api, changed_settings

UNKNOWN = "0" * 32


def client_of(api: Api, **changes: object) -> Client:
    return Client(changed_settings(api.settings, api={"url": api.url, **changes}))


@pytest.fixture
def client(api: Api) -> Client:
    with client_of(api) as opened:
        yield opened


@pytest.fixture
def pdf(tmp_path: Path, make_pdf: Callable[..., bytes]) -> Path:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf("one", "two"))
    return path


def test_a_file_is_sent_and_shown(
    client: Client, pdf: Path, work_off: Callable[..., RunState]
) -> None:
    sent = client.send(pdf, {"collection": "c"})
    assert (sent.status, sent.duplicate) == (RunState.QUEUED, False)
    work_off("# One", "Two")
    assert client.document(sent.id).status is RunState.PROCESSED
    assert [page.markdown for page in client.pages(sent.id)] == ["# One", "Two"]
    assert client.page(sent.id, 2).markdown == "Two"
    assert client.send(pdf, {"collection": "c"}).duplicate


def test_all_pages_of_a_long_document_come_in_order(
    client: Client, pdf: Path, work_off: Callable[..., RunState]
) -> None:
    sent = client.send(pdf, {})
    work_off(*(f"page {n}" for n in range(1, 251)))
    assert [page.number for page in client.pages(sent.id)] == list(range(1, 251))


def test_the_listing_is_fetched_page_by_page(
    client: Client, tmp_path: Path, make_pdf: Callable[..., bytes]
) -> None:
    ids = []
    for number in range(103):
        path = tmp_path / f"{number}.pdf"
        path.write_bytes(make_pdf(f"text {number}"))
        ids.append(client.send(path, {"collection": "many"}).id)
    newest_first = ids[::-1]
    found = [view.id for view in client.documents({"collection": "many"}, 102)]
    assert found == newest_first[:102]
    assert [view.id for view in client.documents({"status": "queued"}, 1000)] == newest_first
    assert client.documents({"collection": "other"}, 10) == []


def test_each_refusal_is_the_error_of_its_code(client: Client, pdf: Path, tmp_path: Path) -> None:
    text = tmp_path / "b.pdf"
    text.write_text("only words")
    client.send(pdf, {})
    for error, ask in [
        (UnsupportedType, lambda: client.send(text, {})),
        (OptionsDiffer, lambda: client.send(pdf, {"ocr": "force"})),
        (InvalidOptions, lambda: client.send(pdf, {"parser": "none"})),
        (NotFound, lambda: client.document(UNKNOWN)),
        (NotFound, lambda: client.document("../health/live")),
        (NotFound, lambda: list(client.pages(UNKNOWN))),
        (NotFound, lambda: client.cancel(UNKNOWN)),
        (InvalidOptions, lambda: client.redo_many({})),
    ]:
        with pytest.raises(error) as caught:
            ask()
        assert type(caught.value) is error
        assert caught.value.message


def test_a_file_over_the_limit_is_refused(start_api: Callable[..., Api], tmp_path: Path) -> None:
    path = tmp_path / "large.pdf"
    path.write_bytes(b"%PDF-1.7\n" + b"x" * 5_000_000)
    with client_of(start_api(limits={"max_bytes": 1000})) as client, pytest.raises(TooLarge):
        client.send(path, {})


def test_cancel_delete_and_redo(
    client: Client, pdf: Path, work_off: Callable[..., RunState]
) -> None:
    sent = client.send(pdf, {})
    assert client.cancel(sent.id)
    assert not client.cancel(sent.id)
    assert client.redo(sent.id, {}).action is Action.QUEUED
    work_off(error=CorruptPdf())
    [would] = client.redo_many({"failed": True, "dry_run": True}).documents
    assert (would.id, would.action) == (sent.id, Action.WOULD_QUEUE)
    [done] = client.redo_many({"ids": [sent.id]}).documents
    assert done.action is Action.QUEUED
    client.delete(sent.id)
    with pytest.raises(NotFound):
        client.document(sent.id)


def test_a_password_opens_a_document(
    client: Client,
    tmp_path: Path,
    make_pdf: Callable[..., bytes],
    work_off: Callable[..., RunState],
) -> None:
    path = tmp_path / "locked.pdf"
    path.write_bytes(make_pdf("secret", password="sesame"))
    with pytest.raises(WrongPassword):
        client.send(path, {"password": "wrong"})
    sent = client.send(path, {})
    work_off(error=EncryptedPdf())
    with pytest.raises(WrongPassword):
        client.redo(sent.id, {"password": "wrong"})
    assert client.redo(sent.id, {"password": "sesame"}).action is Action.QUEUED


def test_the_client_waits_for_a_full_backlog(
    start_api: Callable[..., Api], pdf: Path, tmp_path: Path, make_pdf: Callable[..., bytes]
) -> None:
    other = tmp_path / "other.pdf"
    other.write_bytes(make_pdf("other"))
    with client_of(start_api(limits={"max_backlog": 1})) as client:
        client.send(pdf, {})
        waits: list[float] = []

        def leave(seconds: float) -> None:
            waits.append(seconds)
            client.close()

        with pytest.raises(ServiceUnreachable):
            client.send(other, {}, on_backlog=leave)
    assert len(waits) == 1
    assert waits[0] >= 1


def test_the_key_is_sent_and_a_missing_key_is_unauthorized(start_api: Callable[..., Api]) -> None:
    api = start_api(api={"key": SecretStr("a-key")})
    with client_of(api) as client:
        client.require_answer()
    with client_of(api, key=None) as client, pytest.raises(Unauthorized):
        client.require_answer()


def test_an_unreachable_or_invalid_address_is_an_error(settings: Settings, free_port: int) -> None:
    unreachable = changed_settings(settings, api={"url": f"http://127.0.0.1:{free_port}"})
    with Client(unreachable) as client, pytest.raises(ServiceUnreachable, match="rag-service up"):
        client.require_answer()
    for url in ("127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://[::1"):
        with pytest.raises(ConfigurationError, match="RAG_SERVICE_URL"):
            Client(changed_settings(settings, api={"url": url}))


@pytest.fixture
def free_port() -> int:
    return unused_port()


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ('say "hello".pdf', 'say "hello".pdf'),
        ("tab\tline\nend\x01.pdf", "tab line end .pdf"),
        ("100%.pdf", "100%.pdf"),
        ("größe 請求書.pdf", "größe 請求書.pdf"),
    ],
)
def test_a_filename_is_stored_unchanged(client: Client, pdf: Path, name: str, stored: str) -> None:
    path = pdf.rename(pdf.with_name(name))
    assert client.document(client.send(path, {}).id).filename == stored


def test_a_service_that_does_not_answer_in_time_is_not_called_unreachable(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_service.client._ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        slow = changed_settings(settings, api={"url": url})
        with Client(slow) as client, pytest.raises(AnswerTimeout, match="may still carry out"):
            client.redo_many({"failed": True})
