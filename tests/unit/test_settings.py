"""Settings: one tree, one place for defaults, the environment on top, secrets kept quiet."""

import logging
import os
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from rag_service.config.loader import (
    PACKAGED_CONFIG,
    Settings,
    load_settings,
    options,
    warn_of_doubtful_settings,
    warn_of_unknown_variables,
)
from rag_service.config.options import Section
from rag_service.errors import ConfigurationError

SECRETS = [option for option in options() if option.secret]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        base = name.removesuffix("_FILE")
        if name == "RAG_SERVICE_CONFIG" or any(base == option.env for option in options()):
            monkeypatch.delenv(name)


@pytest.fixture
def own_file(monkeypatch, tmp_path):
    """Write a user's own file and make it the one that is read."""

    def write(text):
        path = tmp_path / "own.yaml"
        path.write_text(text)
        monkeypatch.setenv("RAG_SERVICE_CONFIG", str(path))

    return write


def value_of(settings, option):
    node = settings
    for name in option.path:
        node = getattr(node, name)
    return node.get_secret_value() if isinstance(node, SecretStr) else node


def another(option):
    """A valid value, as text, that differs from the default."""
    special = {
        "log_level": "DEBUG", "pages_in_flight": "3", "engine": "small", "waits": "1, 2.5",
        "transport": "runpod", "layout": "page", "model": "pp_doclayout_v3", "device": "cpu",
        "url": "http://gpu:8000", "table": "seal", "formula": "seal", "picture": "seal",
        "drop": "seal",
        "jitter": "0.25", "base_url": "http://gpu:8000",
        "repo": "http://mirror/layout", "api_base": "http://proxy/v2",
        "public_url": "https://rag.example.com", "webhook_url": "https://hooks.example.com/x",
        "objective": "latency", "server_share": "0.5", "slots": "48", "max_in_flight": "48",
    }  # fmt: skip
    if option.path[-1] in special:
        return special[option.path[-1]]
    match option.default:
        case bool():
            return "false" if option.default else "true"
        case int() | float():
            return str(option.default + 1 if option.default != 100 else 99)
        case _:
            return "something-else"


def secret_of(option, word):
    """A secret with this word in it, of the kind that the option takes."""
    return f"https://hooks.example.com/{word}" if option.path[-1] == "webhook_url" else word


def leaves(tree, path=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def sections(model=Settings):
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from sections(field.annotation)


def test_the_shipped_file_is_valid_and_complete():
    tree = yaml.safe_load(PACKAGED_CONFIG.read_text())
    assert {option.path for option in options()} == set(leaves(tree))
    load_settings()


def test_every_key_has_a_unique_environment_name_and_a_description():
    names = [option.env for option in options()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]+", name) for name in names)
    assert all(option.description for option in options())


def test_names_people_already_know_are_kept():
    names = {option.env for option in options()}
    assert names >= {
        "DATABASE_URL", "REDIS_URL", "GLMOCR_BASE_URL", "GLMOCR_PIPELINE_MAX_WORKERS",
        "OCR_WORKER_CONCURRENCY", "OCR_MAX_TOKENS", "RAG_SERVICE_API_KEY", "RAG_SERVICE_URL",
    }  # fmt: skip


def test_no_default_stands_in_the_code():
    for model in sections():
        for name, field in model.model_fields.items():
            assert field.default is PydanticUndefined, f"{model.__name__}.{name}"
            assert field.default_factory is None, f"{model.__name__}.{name}"


@pytest.mark.parametrize("option", options(), ids=lambda option: option.key)
def test_the_environment_wins_over_every_key(option, monkeypatch, own_file):
    own_file(yaml.safe_dump({"log_level": "WARNING", "retry": {"waits": [7]}}))
    before = value_of(load_settings(), option)
    monkeypatch.setenv(option.env, another(option))
    assert value_of(load_settings(), option) != before


@pytest.mark.parametrize("option", options(), ids=lambda option: option.key)
def test_an_empty_variable_counts_as_unset(option, monkeypatch):
    before = value_of(load_settings(), option)
    monkeypatch.setenv(option.env, "")
    assert value_of(load_settings(), option) == before


def test_a_file_of_ones_own_merges_key_by_key(own_file):
    shipped = load_settings()
    own_file("ocr:\n  dpi: 300\npdf:\nlog_level: DEBUG\n")
    merged = load_settings()
    assert (merged.ocr.dpi, merged.log_level) == (300, "DEBUG")
    assert merged.ocr.max_tokens == shipped.ocr.max_tokens
    assert merged.pdf == shipped.pdf


def test_the_environment_wins_over_ones_own_file(monkeypatch, own_file):
    own_file("ocr:\n  dpi: 300\n")
    monkeypatch.setenv("RAG_SERVICE_OCR_DPI", "200")
    assert load_settings().ocr.dpi == 200


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ocr:\n  dpy: 300\n", "ocr.dpy"),
        ("colour: red\n", "colour"),
        ("ocr:\n  dpi: many\n", "ocr.dpi"),
        ("ocr:\n  dpi: 10\n", "ocr.dpi"),
        ("retry:\n  waits: [10, soon]\n", "retry.waits"),
        ("retry:\n  waits: 10\n", "retry.waits"),
        ("ocr: 5\n", "ocr"),
        ("limits:\n  max_pages: null\n", "limits.max_pages"),
        ("- a\n- b\n", "own.yaml"),
        ("ocr: [\n", "own.yaml"),
    ],
)
def test_a_bad_file_stops_the_start_and_names_the_key(own_file, text, named):
    own_file(text)
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        load_settings()


def test_every_bad_value_is_named_at_once_with_its_variable(monkeypatch):
    monkeypatch.setenv("RAG_SERVICE_OCR_DPI", "many")
    monkeypatch.setenv("OCR_WORKER_CONCURRENCY", "0")
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    for part in ("ocr.dpi", "RAG_SERVICE_OCR_DPI", "ocr.worker_concurrency", "OCR_WORKER_CONC"):
        assert part in str(caught.value)


def test_a_file_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RAG_SERVICE_CONFIG", str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigurationError, match=r"absent\.yaml"):
        load_settings()


def test_pages_in_flight_is_a_number_or_auto(monkeypatch):
    assert load_settings().ocr.pages_in_flight == "auto"
    monkeypatch.setenv("GLMOCR_PIPELINE_MAX_WORKERS", "12")
    assert load_settings().ocr.pages_in_flight == 12
    monkeypatch.setenv("GLMOCR_PIPELINE_MAX_WORKERS", "lots")
    with pytest.raises(ConfigurationError, match="GLMOCR_PIPELINE_MAX_WORKERS"):
        load_settings()


ADDRESSES = [
    option
    for option in options()
    if option.path in {("ocr", "base_url"), ("runpod", "api_base"), ("api", "public_url")}
]


@pytest.mark.parametrize("option", ADDRESSES, ids=lambda option: option.key)
@pytest.mark.parametrize(
    "text",
    ["api.runpod.ai/v2", "localhost:8000", "ftp://x/v2", "https://", "https:///v2", "http://[::1",
     "https://x:port/v2", "https://x:99999/v2", "https://x:0"],
)  # fmt: skip
def test_an_address_that_nothing_can_be_asked_at_stops_the_start(option, text, monkeypatch):
    monkeypatch.setenv(option.env, text)
    with pytest.raises(ConfigurationError, match=re.escape(option.key)) as caught:
        load_settings()
    assert option.env in str(caught.value)


@pytest.mark.parametrize("option", ADDRESSES, ids=lambda option: option.key)
def test_one_address_has_one_spelling(option, monkeypatch):
    spelt = []
    for text in ("https://x.example:8443/y", "https://x.example:8443/y/"):
        monkeypatch.setenv(option.env, text)
        spelt.append(value_of(load_settings(), option))
    assert spelt == ["https://x.example:8443/y"] * 2


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000"])
def test_in_the_clear_the_webhook_is_for_this_machine_alone(monkeypatch, host):
    monkeypatch.setenv("RAG_SERVICE_API_PUBLIC_URL", f"http://{host}/")
    assert load_settings().api.public_url == f"http://{host}"
    for stranger in ("rag.example.com", "10.0.0.7", "127.0.0.1.example.com"):
        monkeypatch.setenv("RAG_SERVICE_API_PUBLIC_URL", f"http://{stranger}")
        with pytest.raises(ConfigurationError, match=r"api\.public_url.*https://"):
            load_settings()


@pytest.mark.parametrize("url", ["http://hooks.example.com/s3cret", "hooks/s3cret", "ftp://s3cret"])
def test_alarms_are_not_posted_in_the_clear_and_the_address_stays_unsaid(monkeypatch, url):
    monkeypatch.setenv("RAG_SERVICE_NOTIFY_WEBHOOK_URL", url)
    with pytest.raises(ConfigurationError, match=r"notify\.webhook_url") as caught:
        load_settings()
    assert "s3cret" not in str(caught.value)


def test_an_alarm_cannot_wait_longer_than_samples_are_kept(monkeypatch):
    monkeypatch.setenv("RAG_SERVICE_OCCUPANCY_KEEP", "60")
    with pytest.raises(ConfigurationError, match=r"occupancy\.starved_after .* occupancy\.keep"):
        load_settings()


@pytest.mark.parametrize("name", ["https://api.runpod.ai/v2/abc", "abc/run", "a b", "abc?x=1", "ä"])
def test_an_endpoint_is_named_by_its_id_alone(monkeypatch, name):
    monkeypatch.setenv("RUNPOD_ENDPOINT_ID", name)
    with pytest.raises(ConfigurationError, match=r"runpod\.endpoint_id.*RUNPOD_ENDPOINT_ID"):
        load_settings()


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, {"GLMOCR_BASE_URL"}),
        ({"GLMOCR_BASE_URL": "http://gpu"}, set()),
        ({"RAG_SERVICE_OCR_TRANSPORT": "runpod"}, {"RUNPOD_ENDPOINT_ID", "RUNPOD_API_KEY"}),
        ({"RAG_SERVICE_OCR_TRANSPORT": "runpod", "RUNPOD_ENDPOINT_ID": "e"}, {"RUNPOD_API_KEY"}),
        ({"RAG_SERVICE_OCR_TRANSPORT": "runpod", "RUNPOD_API_KEY": "k"}, {"RUNPOD_ENDPOINT_ID"}),
        ({"RAG_SERVICE_OCR_TRANSPORT": "runpod", "RUNPOD_API_KEY": "k",
          "RUNPOD_ENDPOINT_ID": "e"}, set()),
    ],
)  # fmt: skip
def test_all_that_pages_need_to_travel_is_named_at_once(monkeypatch, variables, missing):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = load_settings().unset_for_pages
    assert set(re.findall(r"\(([A-Z_]+)\)", told or "")) == missing


@pytest.mark.parametrize(("transport", "warns"), [("runpod", True), ("direct", False)])
def test_a_server_that_gets_no_page_is_warned_about(monkeypatch, caplog, transport, warns):
    monkeypatch.setenv("RAG_SERVICE_OCR_TRANSPORT", transport)
    warn_of_doubtful_settings(load_settings())
    assert not caplog.records
    monkeypatch.setenv("GLMOCR_BASE_URL", "http://gpu")
    warn_of_doubtful_settings(load_settings())
    assert ("GLMOCR_BASE_URL" in caplog.text) == warns


@pytest.mark.parametrize(
    ("layout", "model", "warns"),
    [("regions", "cdla", True), ("auto", "cdla", False), ("regions", "pp_doclayout_v3", False)],
)
def test_regions_by_the_small_model_are_warned_about(monkeypatch, caplog, layout, model, warns):
    monkeypatch.setenv("RAG_SERVICE_OCR_LAYOUT", layout)
    monkeypatch.setenv("RAG_SERVICE_LAYOUT_MODEL", model)
    warn_of_doubtful_settings(load_settings())
    assert ("pp_doclayout_v3" in caplog.text) == warns


def test_a_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", "~/papers")
    assert load_settings().data_dir == Path.home() / "papers"


@pytest.mark.parametrize("option", SECRETS, ids=lambda option: option.key)
def test_a_secret_is_never_printed(option, monkeypatch):
    monkeypatch.setenv(option.env, secret_of(option, "s3cret-value"))
    settings = load_settings()
    assert value_of(settings, option) == secret_of(option, "s3cret-value")
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        assert "s3cret-value" not in text


@pytest.mark.parametrize("option", SECRETS, ids=lambda option: option.key)
def test_a_secret_in_a_config_file_is_refused_without_printing_it(option, own_file):
    tree = "s3cret-value"
    for name in reversed(option.path):
        tree = {name: tree}
    own_file(yaml.safe_dump(tree))
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert option.key in str(caught.value)
    assert option.env in str(caught.value)
    assert "s3cret-value" not in str(caught.value)


@pytest.mark.parametrize("option", SECRETS, ids=lambda option: option.key)
def test_a_secret_may_come_from_a_file(option, monkeypatch, tmp_path):
    in_file, direct = secret_of(option, "from-a-file"), secret_of(option, "from-the-variable")
    (tmp_path / "secret").write_text(in_file + "\n")
    monkeypatch.setenv(option.env + "_FILE", str(tmp_path / "secret"))
    assert value_of(load_settings(), option) == in_file
    monkeypatch.setenv(option.env, direct)
    assert value_of(load_settings(), option) == direct


def test_a_secret_file_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("DATABASE_URL_FILE", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match="DATABASE_URL_FILE"):
        load_settings()


def test_only_secrets_have_a_file_form(monkeypatch, tmp_path):
    (tmp_path / "dpi").write_text("300")
    monkeypatch.setenv("RAG_SERVICE_OCR_DPI_FILE", str(tmp_path / "dpi"))
    assert load_settings().ocr.dpi == 150


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OCR_WORKER_CONCURENCY", "OCR_WORKER_CONCURRENCY"),
        ("GLMOCR_BASEURL", "GLMOCR_BASE_URL"),
        ("RAG_SERVICE_DATADIR", "RAG_SERVICE_DATA_DIR"),
        ("RAG_SERVICE_OCR_DPI_FILE", "RAG_SERVICE_OCR_DPI"),
    ],
)
def test_an_unknown_variable_is_warned_about_with_a_suggestion(caplog, name, meant):
    with caplog.at_level(logging.WARNING):
        assert warn_of_unknown_variables({name: "1"}) == [name]
    assert name in caplog.text
    assert f"Did you mean {meant}?" in caplog.text


def test_known_and_foreign_variables_are_passed_over(caplog):
    known = {option.env: "1" for option in options()}
    secret_files = {option.env + "_FILE": "1" for option in SECRETS}
    foreign = {"PATH": "1", "MY_RAG_SERVICE_X": "1", "OCRA": "1", "RAG_SERVICE_CONFIG": "x"}
    assert warn_of_unknown_variables(known | secret_files | foreign) == []
    assert not caplog.records


def test_a_loaded_tree_cannot_be_changed():
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.ocr.dpi = 300
    with pytest.raises(ValueError, match="frozen"):
        settings.log_level = "DEBUG"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


@given(option=st.sampled_from(options()), text=TEXT)
@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_taken_or_named_never_a_crash(option, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(option.env, text)
        try:
            load_settings()
        except ConfigurationError as error:
            complaint = str(error)
        else:
            complaint = option.key
    assert option.key in complaint


def test_secret_options_are_those_typed_as_secrets():
    typed = {
        (model.__name__, name)
        for model in sections()
        for name, field in model.model_fields.items()
        if SecretStr in (field.annotation, *get_args(field.annotation))
    }
    assert len(typed) == len(SECRETS) > 0


@given(times=st.tuples(*[st.integers(1, 4)] * 3))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_lease_is_renewed_before_its_owner_stops_before_it_ends(times, monkeypatch):
    names = ("RENEW_EVERY", "GIVE_UP_AFTER", "SECONDS")
    for name, value in zip(names, times, strict=True):
        monkeypatch.setenv(f"RAG_SERVICE_LEASE_{name}", str(value))
    renew_every, give_up_after, seconds = times
    if renew_every < give_up_after < seconds:
        assert load_settings().lease.seconds == seconds
        return
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    wrong = ["lease.renew_every"] if renew_every >= give_up_after else ["lease.seconds"]
    for key in (*wrong, "lease.give_up_after"):
        assert key in str(caught.value)


@pytest.mark.parametrize("user", ["name:s3cret@", "s3cret@"])
def test_a_servers_url_carries_no_password_since_it_is_shown_everywhere(monkeypatch, user):
    monkeypatch.setenv("GLMOCR_BASE_URL", f"http://{user}127.0.0.1:5002/v1")
    with pytest.raises(ConfigurationError, match="GLMOCR_API_KEY") as refused:
        load_settings()
    assert "s3cret" not in refused.value.message


@pytest.mark.parametrize("name", ["OCR_WORKER_CONCURRENCY", "GLMOCR_PIPELINE_MAX_WORKERS"])
def test_a_slip_of_the_keyboard_starts_no_million_forks(monkeypatch, name):
    monkeypatch.setenv(name, "1000000")
    with pytest.raises(ConfigurationError, match="1024"):
        load_settings()


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", "1e9", "1025"])
def test_what_is_neither_a_number_nor_auto_is_refused_in_one_sentence(monkeypatch, value):
    monkeypatch.setenv("GLMOCR_PIPELINE_MAX_WORKERS", value)
    with pytest.raises(ConfigurationError) as refused:
        load_settings()
    assert refused.value.message.count("GLMOCR_PIPELINE_MAX_WORKERS") == 1
    assert "must be a whole number from 1 to 1024, or auto" in refused.value.message
    assert "Value error" not in refused.value.message
