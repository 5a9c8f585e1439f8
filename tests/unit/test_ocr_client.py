"""The OCR client against a fake server with every known fault."""

import asyncio
import pickle
import re

import pytest
from pydantic import SecretStr

from rag_service.config.loader import get_settings, load_settings
from rag_service.errors import ConfigurationError, OcrMisconfigured
from rag_service.ocr.ocr_client import (
    ConnectionRefused,
    OcrClient,
    Rejected,
    RejectedForSize,
    ServerFailed,
    server_url,
)
from rag_service.runtime.retry import TryAgain
from tests.fakes import ocr_server as fake
from tests.fakes.scans import Mark, new_number, picture
from tests.waiting import eventually

PROMPT = "Text Recognition:"


@pytest.fixture(scope="module")
def running():
    with fake.FakeOcrServer() as server:
        yield server


@pytest.fixture
def server(running):
    running.reset()
    return running


def settings_for(server, **changes):
    return get_settings().ocr.model_copy(update={"base_url": server.url, **changes})


def ask(server, work, **changes):
    """Run `work(client)` with a client of the server."""

    async def go():
        async with OcrClient(settings_for(server, **changes), connections=2) as client:
            return await work(client)

    return asyncio.run(go())


def read(server, mark=None, max_tokens=100, **changes):
    jpeg = picture(mark or Mark(new_number(), 1))
    return ask(
        server, lambda client: client.read(jpeg, prompt=PROMPT, max_tokens=max_tokens), **changes
    )


def test_an_answer_carries_text_tokens_and_time(server):
    mark = Mark(new_number(), 7)
    answer = read(server, mark)
    assert (answer.text, answer.finish_reason) == (mark.text, "stop")
    assert (answer.prompt_tokens, answer.model) == (100, fake.MODEL)
    assert answer.completion_tokens == len(mark.text) // 4
    assert answer.seconds >= 0


def test_the_request_has_the_form_that_the_model_was_trained_for(server):
    read(server, max_tokens=777, api_key=SecretStr("sesame"))
    request = server.requests[-1]
    assert request.authorization == "Bearer sesame"
    image, prompt = request.body["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert prompt == {"type": "text", "text": "Text Recognition:"}
    rest = {name: value for name, value in request.body.items() if name != "messages"}
    assert rest == {
        "model": "glm-ocr", "max_tokens": 777, "temperature": 0.0, "top_p": 1e-05, "top_k": 1,
        "repetition_penalty": 1.1,
    }  # fmt: skip


def test_no_key_is_sent_if_none_is_set(server):
    read(server)
    assert server.requests[-1].authorization is None


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_error_is_tried_again(server, status):
    server.default = fake.gateway(status)
    with pytest.raises(TryAgain, match=f"HTTP {status}: a web page") as caught:
        read(server)
    assert caught.value.retry_after is None


def test_a_429_has_the_seconds_of_its_retry_after(server):
    server.default = fake.busy("17")
    with pytest.raises(TryAgain, match="Slow down") as caught:
        read(server)
    assert caught.value.retry_after == 17


@pytest.mark.parametrize("reply", [fake.CUT, fake.DROPPED, fake.BAD_GZIP])
def test_a_broken_transfer_is_tried_again(server, reply):
    server.default = reply
    with pytest.raises(TryAgain, match=server.url):
        read(server)


def test_a_time_out_closes_the_connection_first(server):
    server.default = fake.NEVER
    with pytest.raises(TryAgain, match="ReadTimeout"):
        read(server, read_timeout=0.2)
    server.default = fake.OK
    read(server)
    eventually(lambda: not server.alive())
    assert server.requests[0].outcome == "disconnected"
    assert server.peak == 1


def test_a_cancelled_call_closes_its_request(server):
    gate = fake.Gate()
    server.default = fake.Reply(gate=gate)

    async def cancelled(client):
        reading = asyncio.create_task(client.read(picture(Mark(1, 1)), prompt=PROMPT, max_tokens=9))
        await asyncio.to_thread(gate.arrived.wait, 10)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        while server.alive():
            await asyncio.sleep(0.01)

    ask(server, cancelled)
    assert server.requests[0].outcome == "disconnected"


def test_a_refused_connection_differs_from_a_broken_one(server):
    server.refuse()
    with pytest.raises(ConnectionRefused, match="cannot be reached"):
        read(server)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_is_a_configuration_error(server, status):
    server.default = fake.refusal(status, "model 'x' not found")
    with pytest.raises(OcrMisconfigured, match=f"HTTP {status}: .*not found"):
        read(server)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_page_is_not_tried_again(server, status):
    server.default = fake.refusal(status)
    with pytest.raises(Rejected, match="of no use") as caught:
        read(server)
    assert isinstance(caught.value, RejectedForSize) == (status == 413)


@pytest.mark.parametrize(
    "message",
    [
        "The decoder prompt (length 9000) exceeds the encoder cache size",
        "Input is too long: 40000 tokens",
        "This model's maximum context length is 32768 tokens",
        "image too large",
    ],
)
def test_a_refusal_for_size_is_recognised_by_its_words(server, message):
    server.default = fake.refusal(400, message)
    with pytest.raises(RejectedForSize):
        read(server)


@pytest.mark.parametrize(
    "reply",
    [
        fake.refusal(500, "CUDA error"), fake.refusal(418), fake.HTML_200, fake.TRUNCATED_JSON,
        fake.NO_CHOICES, fake.NULL_CONTENT, fake.Reply(body=b""), fake.Reply(body=b"[1, 2]"),
        fake.Reply(body=b"\xff\xfe"), fake.Reply(body=b"[" * 100_000),
        fake.Reply(text="half", finish_reason="abort"),
    ],
)  # fmt: skip
def test_an_unusable_answer_is_a_server_failure(server, reply):
    server.default = reply
    with pytest.raises(ServerFailed):
        read(server)


def test_broken_characters_are_returned_unchanged(server):
    server.default = fake.BROKEN_CHARACTERS
    assert read(server).text == "a\x00b \ud83d c"


def test_a_missing_finish_reason_means_that_the_answer_ended(server):
    server.default = fake.Reply(finish_reason=None)
    assert read(server).finish_reason == "stop"


@pytest.mark.parametrize(
    "error",
    [
        Rejected("no"), RejectedForSize("too large"), ServerFailed("500"), TryAgain("503", 4.0),
        ConnectionRefused("gone"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_every_error_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert getattr(copy, "retry_after", None) == getattr(error, "retry_after", None)


def probe(server, **changes):
    return ask(server, lambda client: client.probe(), **changes)


def test_a_healthy_server_passes_its_probe(server):
    assert probe(server).ok
    assert server.probes == 1


def test_a_server_without_health_is_judged_by_its_models(server):
    server.health = fake.refusal(404)
    assert probe(server).ok


@pytest.mark.parametrize(
    "health",
    [
        fake.gateway(503), fake.refusal(500), fake.CUT,
        fake.Reply(body=b'{"status": "loading", "model_loaded": false}'),
    ],
)  # fmt: skip
def test_a_server_that_lists_its_models_while_loading_is_not_up(server, health):
    server.health = health
    found = probe(server)
    assert (found.ok, found.misconfigured) == (False, False)
    assert found.message


def test_a_refused_key_is_a_misconfiguration(server):
    server.key = "sesame"
    assert probe(server, api_key=SecretStr("sesame")).ok
    found = probe(server, api_key=SecretStr("wrong"))
    assert (found.ok, found.misconfigured) == (False, True)
    assert "GLMOCR_API_KEY" in found.message
    assert "wrong" not in found.message


def test_a_redirect_is_a_misconfiguration_that_names_its_target(server):
    server.health = fake.Reply(302, headers={"Location": "https://gpu.example/health"})
    found = probe(server)
    assert (found.ok, found.misconfigured) == (False, True)
    assert "HTTP 302 to https://gpu.example/health; check GLMOCR_BASE_URL" in found.message


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_list_of_models_is_a_misconfiguration(server, status):
    server.models_status = status
    found = probe(server)
    assert (found.ok, found.misconfigured) == (False, True)


def test_another_model_is_a_misconfiguration_that_names_both(server):
    found = probe(server, model="qwen")
    assert (found.ok, found.misconfigured) == (False, True)
    assert "qwen" in found.message
    assert fake.MODEL in found.message


def check(server, **changes):
    return ask(server, lambda client: client.probe_models(), **changes)


def test_the_check_of_the_settings_does_not_ask_for_health(server):
    server.health = fake.gateway(503)
    assert check(server).ok
    assert server.probes == 0


def test_a_refused_key_and_a_missing_one_have_different_messages(server):
    server.key = "sesame"
    wrong, unset = check(server, api_key=SecretStr("wrong")), check(server, api_key=None)
    assert wrong.message.endswith("HTTP 401; check GLMOCR_API_KEY")
    assert unset.message.endswith("HTTP 401; check GLMOCR_API_KEY, which is not set")
    with pytest.raises(OcrMisconfigured, match=r"HTTP 401.*; check GLMOCR_API_KEY"):
        read(server)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (fake.HTML_200, "is no list of models but a web page, 'Sign in'; check GLMOCR_BASE_URL"),
        (fake.Reply(body=b'{"status": "ok"}'), "no list of models but .*; check GLMOCR_BASE_URL"),
        (fake.Reply(body=b"[]"), "no list of models"),
        (fake.Reply(body=b""), "no list of models but empty body"),
        (fake.refusal(404), "HTTP 404; check GLMOCR_BASE_URL"),
    ],
)
def test_an_address_without_an_ocr_server_is_named_in_a_sentence(server, reply, words):
    server.not_models = reply
    found = check(server)
    assert (found.ok, found.misconfigured) == (False, True)
    assert re.search(words, found.message)
    assert "path" not in found.message


@pytest.mark.parametrize("path", ["/api", "/v1/chat/completions"])
def test_a_path_in_the_address_is_named(server, path):
    found = check(server, base_url=server.url + path)
    assert found.misconfigured
    assert f"check GLMOCR_BASE_URL: it has the path {path}, to which /v1" in found.message


def test_an_unreachable_server_fails_its_probe(server):
    server.refuse()
    found = probe(server)
    assert (found.ok, found.misconfigured) == (False, False)


def test_the_context_length_is_read_from_the_list_of_models(server):
    server.models = [{"id": "other"}, {"id": fake.MODEL, "max_model_len": 9000, "owned_by": "vllm"}]
    info = ask(server, lambda client: client.model_info())
    assert (info.owner, info.max_model_len) == ("vllm", 9000)


def test_a_server_that_says_nothing_about_its_model_is_no_error(server):
    server.models = [{"id": fake.MODEL, "max_model_len": "many"}]
    assert ask(server, lambda client: client.model_info()).max_model_len is None
    server.refuse()
    assert ask(server, lambda client: client.model_info()).owner is None


@pytest.mark.parametrize("given", ["http://gpu:5002", "http://gpu:5002/", "http://gpu:5002/v1/"])
def test_the_url_is_taken_with_and_without_v1(given, monkeypatch):
    monkeypatch.setenv("GLMOCR_BASE_URL", given)
    assert server_url(load_settings().ocr) == "http://gpu:5002"


def test_a_url_without_a_scheme_stops_the_start_up(monkeypatch):
    monkeypatch.setenv("GLMOCR_BASE_URL", "gpu:5002")
    with pytest.raises(ConfigurationError, match=r"GLMOCR_BASE_URL|http://"):
        load_settings()


def test_without_a_url_the_setting_is_named():
    chosen = get_settings().ocr.model_copy(update={"base_url": None})
    with pytest.raises(ConfigurationError, match="GLMOCR_BASE_URL"):
        server_url(chosen)
