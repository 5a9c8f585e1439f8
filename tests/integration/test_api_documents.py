"""Documents over HTTP: new files, known files, refusals."""

import resource
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
from PIL import Image

from rag_service.documents.byte_store import MARKER
from rag_service.documents.storage import DocumentStore, working_key
from rag_service.errors import CorruptPdf, EncryptedPdf
from tests import simulation as sim


def picture(kind: str) -> bytes:
    out = BytesIO()
    Image.new("RGB", (40, 40), "white").save(out, kind)
    return out.getvalue()


def problem(answer, status: int, code: str) -> dict:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert answer.json()["detail"]
    return answer.json()


def test_a_new_document_is_accepted_and_shown(api, make_pdf):
    answer = api.upload(make_pdf("one", "two"), filename="bill.pdf", collection="bills")
    assert answer.status_code == 202
    body = answer.json()
    assert body == {"id": body["id"], "status": "queued", "duplicate": False}
    assert answer.headers["location"] == f"/documents/{body['id']}"
    shown = api.get(body["id"])
    assert shown["filename"] == "bill.pdf"
    assert shown["collection"] == "bills"
    assert shown["media_type"] == "application/pdf"
    assert (shown["status"], shown["queue_position"]) == ("queued", 1)
    assert shown["waiting_for"] == "worker"


@pytest.mark.parametrize("kind", ["png", "jpeg", "tiff", "webp"])
def test_pictures_are_recognised_by_their_bytes(api, kind):
    document_id = api.add(picture(kind), filename="whatever.txt")
    assert api.get(document_id)["media_type"] == f"image/{kind}"


def test_the_file_may_come_before_the_options(api, make_pdf):
    parts = [
        ("file", ("a.pdf", make_pdf("a"))),
        ("collection", (None, "late")),
        ("ocr", (None, "off")),
        ("priority", (None, "interactive")),
    ]
    answer = api.client.post("/documents", files=parts)
    assert answer.status_code == 202
    shown = api.get(answer.json()["id"])
    assert (shown["collection"], shown["ocr"]) == ("late", "off")


class TestTheSameFileAgain:
    def test_active_with_the_same_options(self, api, make_pdf):
        content = make_pdf("a")
        document_id = api.add(content)
        again = api.upload(content)
        assert again.status_code == 200
        assert again.json() == {"id": document_id, "status": "queued", "duplicate": True}

    def test_processed_with_the_same_options(self, api, make_pdf, work_off):
        content = make_pdf("a")
        document_id = api.add(content)
        work_off("a")
        again = api.upload(content)
        assert again.status_code == 200
        assert again.json() == {"id": document_id, "status": "processed", "duplicate": True}

    @pytest.mark.parametrize("processed", [False, True])
    def test_with_other_options(self, api, make_pdf, work_off, processed):
        content = make_pdf("a")
        api.add(content)
        if processed:
            work_off("a")
        found = problem(api.upload(content, ocr="force"), 409, "options_differ")
        assert "reprocess" in found["detail"]

    def test_failed(self, api, make_pdf, work_off):
        content = make_pdf("a")
        document_id = api.add(content)
        work_off(error=CorruptPdf())
        again = api.upload(content, ocr="force")
        assert again.status_code == 202
        assert again.json() == {"id": document_id, "status": "queued", "duplicate": True}

    def test_cancelled(self, api, make_pdf):
        content = make_pdf("a")
        document_id = api.add(content)
        api.client.post(f"/documents/{document_id}/cancel")
        again = api.upload(content)
        assert again.status_code == 202
        assert again.json() == {"id": document_id, "status": "queued", "duplicate": True}

    def test_deleted(self, api, make_pdf):
        content = make_pdf("a")
        document_id = api.add(content)
        assert api.client.delete(f"/documents/{document_id}").status_code == 204
        again = api.upload(content)
        assert again.status_code == 202
        assert again.json()["duplicate"] is False
        assert again.json()["id"] != document_id

    def test_in_another_collection(self, api, make_pdf):
        content = make_pdf("a")
        first = api.add(content)
        assert api.add(content, collection="other") != first

    def test_many_at_the_same_time(self, api, make_pdf):
        content = make_pdf("a")
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: api.upload(content), range(12)))
        assert sorted(a.status_code for a in answers) == [200] * 11 + [202]
        assert len({a.json()["id"] for a in answers}) == 1
        assert len(api.client.get("/documents").json()["documents"]) == 1


class TestRefused:
    """None of these leaves a row or a file."""

    @pytest.fixture(autouse=True)
    def nothing_remains(self, api):
        yield
        assert api.client.get("/documents").json()["documents"] == []
        assert list((api.settings.data_dir / "documents" / "incoming").iterdir()) == []

    def test_wrong_type(self, api):
        problem(api.upload(b"MZ\x90\x00 a program", filename="a.pdf"), 415, "unsupported_type")

    def test_empty(self, api):
        problem(api.upload(b""), 422, "empty_file")

    @pytest.mark.parametrize(
        "options",
        [
            {"ocr": "maybe"},
            {"parser": "nobody"},
            {"priority": "urgent"},
            {"collection": "../etc\x00"},
            {"colection": "typo"},
            {"password": "x" * 9000},
        ],
    )
    def test_bad_options(self, api, make_pdf, options):
        name = next(iter(options))
        found = problem(api.upload(make_pdf("a"), **options), 422, "invalid_options")
        assert name in found["detail"] or "no parser" in found["detail"]

    def test_an_option_twice(self, api, make_pdf):
        parts = [("ocr", (None, "off")), ("ocr", (None, "force")), ("file", make_pdf("a"))]
        problem(api.client.post("/documents", files=parts), 422, "invalid_options")

    def test_two_files(self, api, make_pdf):
        parts = [("file", make_pdf("a")), ("file", make_pdf("b"))]
        problem(api.client.post("/documents", files=parts), 422, "invalid_options")

    def test_no_file(self, api):
        answer = api.client.post("/documents", files={"ocr": (None, "off")})
        assert "file" in problem(answer, 422, "invalid_options")["detail"]

    @pytest.mark.parametrize("kind", ["application/pdf", "multipart/form-data", ""])
    def test_no_form(self, api, make_pdf, kind):
        headers = {"content-type": kind}
        answer = api.client.post("/documents", content=make_pdf("a"), headers=headers)
        problem(answer, 422, "invalid_options")

    def test_wrong_password(self, api, make_pdf):
        content = make_pdf("secret", password="right")
        problem(api.upload(content, password="wrong"), 422, "wrong_password")


def test_too_large_is_refused(start_api, make_pdf):
    api = start_api(limits={"max_bytes": 100})
    found = problem(api.upload(make_pdf("a")), 413, "too_large")
    assert "limits.max_bytes" in found["detail"]


def test_a_full_backlog_is_503_with_retry_after(start_api, make_pdf):
    api = start_api(limits={"max_backlog": 1})
    api.add(make_pdf("a"))
    answer = api.upload(make_pdf("b"))
    problem(answer, 503, "backlog_full")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("/abs/olute.pdf", "olute.pdf"),
        ("Grüße 東京.pdf", "Grüße 東京.pdf"),
        ("..", ".."),
    ],
)
def test_a_name_is_shown_without_folders_and_never_used_as_a_path(api, make_pdf, sent, shown):
    before = set(api.settings.data_dir.parent.rglob("*"))
    document_id = api.add(make_pdf("a"), filename=sent)
    assert api.get(document_id)["filename"] == shown
    new = set(api.settings.data_dir.parent.rglob("*")) - before
    ours = ("health", MARKER)
    named = [path for path in new if not path.is_dir() and path.name not in ours]
    assert [path.name for path in named] == [api.get(document_id)["sha256"]]


class TestPassword:
    def test_opens_the_document_and_is_not_stored(self, api, make_pdf, settings, database):
        document_id = api.add(make_pdf("secret", password="only-once"), password="only-once")
        key = working_key(document_id)
        with DocumentStore(settings).open_local(key) as path:
            assert b"/Encrypt" not in path.read_bytes()
        drawn = api.client.get(f"/documents/{document_id}/pages/1/image")
        assert drawn.status_code == 200
        files = [path for path in settings.data_dir.rglob("*") if path.is_file()]
        assert not [path for path in files if b"only-once" in path.read_bytes()]
        assert "only-once" not in str(api.get(document_id))

    def test_is_ignored_if_none_is_needed(self, api, make_pdf, settings):
        document_id = api.add(make_pdf("open"), password="needless")
        assert not DocumentStore(settings).exists(working_key(document_id))

    def test_is_accepted_with_a_second_upload(self, api, make_pdf, settings, work_off):
        content = make_pdf("secret", password="right")
        document_id = api.add(content)
        work_off(error=EncryptedPdf())
        again = api.upload(content, password="right")
        assert again.status_code == 202
        assert again.json() == {"id": document_id, "status": "queued", "duplicate": True}
        store = DocumentStore(settings)
        assert store.exists(working_key(document_id))
        encrypted = [p for p in (settings.data_dir / "documents/sha256").rglob("*") if p.is_file()]
        assert encrypted == []

    def test_a_damaged_file_gets_a_row_too(self, api):
        api.add(b"%PDF-1.7 nothing but this line", password="any")


class TestListing:
    def test_returns_all_documents_page_by_page_newest_first(self, api, make_pdf):
        added = [api.add(make_pdf(str(n))) for n in range(5)]
        seen, cursor = [], None
        while True:
            query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
            body = api.client.get("/documents", params=query).json()
            seen += [d["id"] for d in body["documents"]]
            cursor = body["next_cursor"]
            if cursor is None:
                break
        assert seen == added[::-1]

    def test_filters_documents(self, api, make_pdf, work_off):
        failed = api.add(make_pdf("a"), collection="x")
        work_off(error=EncryptedPdf())
        waiting = api.add(make_pdf("b"), collection="y")

        def ids(**query):
            return [d["id"] for d in api.client.get("/documents", params=query).json()["documents"]]

        assert ids(status="failed") == [failed]
        assert ids(error="encrypted_pdf") == [failed]
        assert ids(collection="y") == [waiting]
        assert ids(collection="y", status="failed") == []

    @pytest.mark.parametrize(
        "query",
        ["cursor=rubbish", "cursor=AAAA", "status=lost", "limit=0", "limit=x", "collection=%00"],
    )
    def test_refuses_invalid_parameters(self, api, query):
        problem(api.client.get(f"/documents?{query}"), 422, "invalid_options")


STRANGE_IDS = ["0" * 32, "x", "%27%3B%20DROP%20TABLE%20documents--", "%00", "%ff%fe", "a" * 5000]


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("GET", ""),
        ("GET", "/pages"),
        ("GET", "/pages/1"),
        ("GET", "/pages/1/image"),
        ("GET", "/markdown"),
        ("GET", "/events"),
        ("POST", "/reprocess"),
        ("POST", "/cancel"),
        ("DELETE", ""),
    ],
)
def test_an_unknown_id_is_not_found(api, method, rest):
    for document_id in STRANGE_IDS:
        answer = api.client.request(method, f"/documents/{document_id}{rest}")
        problem(answer, 404, "not_found")


def test_an_unknown_route_is_a_problem_that_names_it(api):
    found = problem(api.client.get("/nothing/here"), 404, "not_found")
    assert found["detail"].startswith("No route /nothing/here;")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/documents", "GET, HEAD, POST"),
        ("PATCH", f"/documents/{'0' * 32}", "DELETE, GET, HEAD"),
        ("GET", "/reprocess", "POST"),
        ("OPTIONS", "/health/live", "GET, HEAD"),
        ("POST", "/openapi.json", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_refused_with_the_methods_that_the_path_takes(api, method, path, allowed):
    answer = api.client.request(method, path)
    found = problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == allowed
    assert allowed in found["detail"]
    assert method in found["detail"]


def test_head_has_the_head_of_get_without_its_body(api, make_pdf, work_off):
    document_id = api.add(make_pdf("a"))
    # The document is not finished, so its stream of events would go on.
    for path in ("", "/events", "/pages", "/markdown", "/pages/1/image"):
        head = api.client.head(f"/documents/{document_id}{path}")
        assert (head.status_code, head.content) == (200, b""), path
    for path in ("/health/live", "/docs", "/openapi.json", "/documents"):
        head, get = api.client.head(path), api.client.get(path)
        assert head.headers["content-type"] == get.headers["content-type"]
        assert head.headers["content-length"] == get.headers["content-length"]
    assert api.client.head("/documents/nope").status_code == 404
    assert api.client.head("/reprocess").status_code == 405


def test_cancel_returns_whether_a_run_was_active(api, make_pdf):
    document_id = api.add(make_pdf("a"))
    first = api.client.post(f"/documents/{document_id}/cancel")
    assert first.json() == {"id": document_id, "cancelled": True}
    assert api.client.post(f"/documents/{document_id}/cancel").json()["cancelled"] is False
    assert api.get(document_id)["status"] == "cancelled"


def test_a_deleted_document_is_not_found(api, make_pdf):
    document_id = api.add(make_pdf("a"))
    assert api.client.delete(f"/documents/{document_id}").status_code == 204
    problem(api.client.get(f"/documents/{document_id}"), 404, "not_found")
    problem(api.client.delete(f"/documents/{document_id}"), 404, "not_found")
    assert api.client.get("/documents").json()["documents"] == []


@pytest.mark.parametrize(
    ("escaped", "shown"),
    [
        ("say %22hello%22.pdf", 'say "hello".pdf'),
        ("two%0D%0Alines.pdf", "two lines.pdf"),
        ("100%25 %41.pdf", "100%25 %41.pdf"),
        ("größe.pdf", "größe.pdf"),
    ],
)
def test_a_name_is_read_as_browsers_escape_it(api, make_pdf, escaped, shown):
    head = f'--B\r\nContent-Disposition: form-data; name="file"; filename="{escaped}"\r\n\r\n'
    answer = api.client.post(
        "/documents",
        content=head.encode() + make_pdf("a") + b"\r\n--B--\r\n",
        headers={"content-type": "multipart/form-data; boundary=B"},
    )
    assert api.get(answer.json()["id"])["filename"] == shown


@pytest.mark.parametrize("error", ["encryptd_pdf", "not_found", "foo"])
def test_a_listing_by_an_unknown_code_is_refused(api, error):
    found = problem(api.client.get("/documents", params={"error": error}), 422, "invalid_options")
    assert error in found["detail"]


@pytest.mark.parametrize(
    ("address", "name", "hint"),
    [
        ("/documents?stauts=failed", "stauts", "Did you mean status?"),
        ("/documents?q=x", "q", "limit"),
        (f"/documents/{'0' * 32}?page=1", "page", "no query parameters"),
        (f"/documents/{'0' * 32}/pages?offset=3", "offset", "after"),
        (f"/documents/{'0' * 32}/markdown?pages=3", "pages", "no query parameters"),
        (f"/documents/{'0' * 32}/events?since=3", "since", "no query parameters"),
    ],
)
def test_unknown_parameters_are_refused(api, address, name, hint):
    found = problem(api.client.get(address), 422, "invalid_options")
    assert repr(name) in found["detail"]
    assert hint in found["detail"]


def test_an_unknown_id_is_named(api):
    for path in ("0" * 32, "nope", f"{'0' * 32}/pages", f"{'0' * 32}/pages/1/image"):
        found = problem(api.client.get(f"/documents/{path}"), 404, "not_found")
        assert path.partition("/")[0] in found["detail"]


def test_a_size_refusal_names_the_limit_and_its_setting(start_api):
    api = start_api(limits={"max_bytes": 1_000_000})
    for size in (1_000_001, 2_000_000):
        found = problem(api.upload(b"%PDF-1.7" + b"x" * size), 413, "too_large")
        assert found["detail"] == "The file is larger than limits.max_bytes (1000000 bytes)."


def test_a_full_disk_is_storage_unavailable(api, make_pdf):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        answer = api.upload(make_pdf("a") + b"\n" * 3_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = problem(answer, 503, "storage_unavailable")
    assert (found["retryable"], "File too large" in found["detail"]) == (True, True)
    assert list((api.settings.data_dir / "documents" / "incoming").iterdir()) == []


def test_a_refusal_of_postgresql_is_answered_with_its_message(api, make_pdf):
    document_id = api.add(make_pdf("a"))
    sim.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'could not extend: No space left on device' USING ERRCODE = '53100';"
        " END $$"
    )
    sim.execute(
        "CREATE TRIGGER refuses BEFORE UPDATE ON runs FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    try:
        answer = api.client.post(f"/documents/{document_id}/cancel")
    finally:
        sim.execute("DROP FUNCTION refuse CASCADE")
    found = problem(answer, 503, "database_unavailable")
    assert found["retryable"]
    assert "could not extend: No space left on device" in found["detail"]
    assert "UPDATE" not in found["detail"]


def test_the_bare_address_redirects_to_the_docs(api):
    answer = api.client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/docs")
