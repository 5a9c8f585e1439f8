"""Bodies with a wrong length, endless, incomplete or invalid, sent over raw connections."""

import socket
import threading
from contextlib import ExitStack, closing, suppress

import hypothesis
import pytest
from hypothesis import strategies
from pydantic import SecretStr

from rag_service.api import upload
from tests.waiting import eventually

HEAD = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.pdf"\r\n\r\n%PDF-1.7\n'
END = b"\r\n--B--\r\n"
CHUNK = b"x" * 65536
MIB = 1024 * 1024


def connect(api, *headers: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", api.port), timeout=60)
    lines = [
        "POST /documents HTTP/1.1",
        f"Host: 127.0.0.1:{api.port}",
        "Content-Type: multipart/form-data; boundary=B",
        *headers,
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def answer_of(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def send_chunks(connection: socket.socket, first: bytes, most: int) -> int:
    """Send chunks until the server stops reading. Return the bytes sent, `most` at most."""
    sent = 0
    connection.setblocking(False)
    data = first
    while sent < most:
        try:
            if connection.recv(1, socket.MSG_PEEK):
                break
        except BlockingIOError:
            pass
        connection.setblocking(True)
        connection.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        connection.setblocking(False)
        sent += len(data)
        data = CHUNK
    connection.setblocking(True)
    return sent


def incoming(api) -> list:
    return list((api.settings.data_dir / "documents").glob("incoming/*"))


def listed(api) -> list:
    return api.client.get("/documents").json()["documents"]


def test_a_length_beyond_the_limit_is_refused_before_the_body(start_api):
    api = start_api(limits={"max_bytes": MIB})
    with closing(connect(api, "Content-Length: 9999999999", "Expect: 100-continue")) as connection:
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in answer
    assert b'"too_large"' in answer


def test_an_endless_body_is_refused_while_it_arrives(start_api):
    api = start_api(limits={"max_bytes": 4 * MIB})
    with closing(connect(api, "Transfer-Encoding: chunked")) as connection:
        sent = send_chunks(connection, HEAD, most=512 * MIB)
        connection.shutdown(socket.SHUT_WR)
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert 4 * MIB <= sent < 512 * MIB
    assert incoming(api) == []
    assert listed(api) == []


def test_an_endless_tail_after_the_form_is_refused_too(start_api):
    api = start_api(limits={"max_bytes": MIB})
    with closing(connect(api, "Transfer-Encoding: chunked")) as connection:
        send_chunks(connection, HEAD + END, most=512 * MIB)
        connection.shutdown(socket.SHUT_WR)
        assert answer_of(connection).startswith(b"HTTP/1.1 413 ")
    assert listed(api) == []


def test_the_refusal_reaches_a_client_that_sends_everything_first(start_api, make_pdf):
    api = start_api(limits={"max_bytes": MIB})
    answer = api.upload(make_pdf("a") + b"\n" * 8 * MIB)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


def test_a_disconnected_client_leaves_no_file(api):
    with closing(connect(api, "Content-Length: 100000000")) as connection:
        connection.sendall(HEAD + CHUNK * 40)
        eventually(lambda: incoming(api))
    eventually(lambda: not incoming(api))
    assert listed(api) == []


@pytest.mark.parametrize("body", [HEAD, HEAD + b"\r\n--B", HEAD + b"\r\n--B\r\n", b"", b"--B--"])
def test_an_incomplete_form_adds_no_document(api, body):
    with closing(connect(api, f"Content-Length: {len(body)}", "Connection: close")) as connection:
        connection.sendall(body)
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 422 ")
    assert b'"invalid_options"' in answer
    assert listed(api) == []
    assert incoming(api) == []


def test_a_client_that_stops_sending_is_disconnected(api, monkeypatch):
    monkeypatch.setattr(upload, "_SILENCE_SECONDS", 0.2)
    with closing(connect(api, "Content-Length: 50000")) as connection:
        connection.sendall(HEAD)
        assert connection.recv(65536).startswith(b"HTTP/1.1 422 ")
    assert listed(api) == []


def test_slow_senders_do_not_keep_others_from_uploading(api, monkeypatch, make_pdf):
    """As many as there are slots, each with a byte now and then: never silent for long."""
    monkeypatch.setattr(upload, "_SLOW_START_SECONDS", 1.0)
    with ExitStack() as connections:
        senders = [
            connections.enter_context(closing(connect(api, "Content-Length: 50000")))
            for _ in range(64)
        ]
        stop = threading.Event()

        def drip():
            while not stop.wait(0.1):
                for sender in senders:
                    with suppress(OSError):
                        sender.sendall(b"x")

        for sender in senders:
            sender.sendall(HEAD)
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert api.add(make_pdf("a"))
            answers = [sender.recv(65536) for sender in senders]
        finally:
            stop.set()
            thread.join()
    assert all(answer.startswith(b"HTTP/1.1 422 ") for answer in answers)
    assert all(b"bytes a second" in answer for answer in answers)
    assert incoming(api) == []


def test_a_webhook_without_a_token_is_refused_before_its_body(api):
    request = (
        f"POST /webhooks/runpod/made-up HTTP/1.1\r\nHost: 127.0.0.1:{api.port}\r\n"
        "Content-Length: 9999999\r\nExpect: 100-continue\r\n\r\n"
    )
    with closing(socket.create_connection(("127.0.0.1", api.port), 10)) as connection:
        connection.sendall(request.encode())
        assert answer_of(connection).startswith(b"HTTP/1.1 404 ")


def test_a_missing_key_is_refused_before_the_body(start_api):
    api = start_api(api={"key": SecretStr("secret")})
    with closing(connect(api, "Content-Length: 99999999", "Expect: 100-continue")) as connection:
        assert answer_of(connection).startswith(b"HTTP/1.1 401 ")


PIECES = strategies.sampled_from(
    [
        b"--B", b"--B\r\n", b"--B--", b"\r\n", b"\n", b"\r", b":", b"; ", b'"', b"\\", b"\x00",
        b"\xff\xfe", b"%PDF-1.7\n", b"name=", b"filename=", b"Content-Disposition: form-data",
        b'Content-Disposition: form-data; name="file"; filename="a.pdf"\r\n\r\n',
        b'Content-Disposition: form-data; name="ocr"\r\n\r\n',
        b'Content-Disposition: form-data; name="password"\r\n\r\n',
        b"Content-Type: text/plain\r\n", b"Content-Transfer-Encoding: base64\r\n",
    ]
)  # fmt: skip
BODIES = strategies.lists(PIECES | strategies.binary(max_size=40), max_size=25).map(b"".join)
# Control characters in a header are refused before they reach us.
BOUNDARIES = strategies.just(b"B") | strategies.binary(max_size=80).map(
    lambda boundary: bytes(byte for byte in boundary if byte > 0x20 and byte != 0x7F)
)


def test_random_bodies_are_never_a_server_error(api):
    @hypothesis.given(body=BODIES, boundary=BOUNDARIES)
    @hypothesis.settings(max_examples=200, deadline=None)
    def check(body: bytes, boundary: bytes) -> None:
        kind = b"multipart/form-data; boundary=" + boundary
        headers = {b"content-type": kind.strip()}
        answer = api.client.post("/documents", content=body, headers=headers)
        assert answer.status_code in {200, 202, 409, 415, 422}, answer.text
        assert answer.json()

    check()
    assert incoming(api) == []
