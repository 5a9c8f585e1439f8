"""Settings: one tree, one place for defaults, the environment wins, secrets are not shown."""

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

from rag_service.config import loader
from rag_service.config.loader import (
    PACKAGED_CONFIG,
    current_names,
    load_settings,
    packaged_defaults,
    unknown_variables,
    value_at,
    warn_of_doubtful_settings,
)
from rag_service.config.option_list import options
from rag_service.config.options import Section, Settings
from rag_service.errors import ConfigurationError

SECRETS = [option for option in options() if option.secret]
RENAMED = [option for option in options() if option.old_key]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    known = {name for option in options() for name in option.variables}
    for name in {"RAG_SERVICE_CONFIG", *known} & set(os.environ):
        monkeypatch.delenv(name)
    loader._warn_of_old_name.cache_clear()


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
    default = value_at(packaged_defaults(), option.path)
    match default:
        case bool():
            return "false" if default else "true"
        case int() | float():
            return str(default + 1)
        case _:
            return "something-else"


def secret_of(option, word):
    """A valid value of a secret option that contains this word."""
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


def test_established_variable_names_are_kept():
    names = {option.env for option in options()}
    assert names >= {
        "DATABASE_URL", "REDIS_URL", "GLMOCR_BASE_URL", "GLMOCR_PIPELINE_MAX_WORKERS",
        "OCR_WORKER_CONCURRENCY", "OCR_MAX_TOKENS", "RAG_SERVICE_API_KEY", "RAG_SERVICE_URL",
    }  # fmt: skip


def test_the_code_has_no_defaults():
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


def test_the_users_file_is_merged_key_by_key(own_file):
    shipped = load_settings()
    own_file("ocr:\n  dpi: 300\npdf:\nlog_level: DEBUG\n")
    merged = load_settings()
    assert (merged.ocr.dpi, merged.log_level) == (300, "DEBUG")
    assert merged.ocr.max_tokens == shipped.ocr.max_tokens
    assert merged.pdf == shipped.pdf


def test_the_environment_wins_over_the_users_file(monkeypatch, own_file):
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
def test_a_bad_file_is_an_error_that_names_the_key(own_file, text, named):
    own_file(text)
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        load_settings()


def test_one_error_names_every_bad_value_with_its_variable(monkeypatch):
    monkeypatch.setenv("RAG_SERVICE_OCR_DPI", "many")
    monkeypatch.setenv("OCR_WORKER_CONCURRENCY", "0")
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    for part in ("ocr.dpi", "RAG_SERVICE_OCR_DPI", "ocr.worker_concurrency", "OCR_WORKER_CONC"):
        assert part in str(caught.value)


def test_a_missing_file_is_named(monkeypatch, tmp_path):
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
def test_an_unusable_url_is_an_error(option, text, monkeypatch):
    monkeypatch.setenv(option.env, text)
    with pytest.raises(ConfigurationError, match=re.escape(option.key)) as caught:
        load_settings()
    assert option.env in str(caught.value)


@pytest.mark.parametrize("option", ADDRESSES, ids=lambda option: option.key)
def test_a_slash_at_the_end_of_a_url_is_removed(option, monkeypatch):
    urls = []
    for text in ("https://x.example:8443/y", "https://x.example:8443/y/"):
        monkeypatch.setenv(option.env, text)
        urls.append(value_of(load_settings(), option))
    assert urls == ["https://x.example:8443/y"] * 2


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000"])
def test_plain_http_is_allowed_for_the_webhook_on_loopback_only(monkeypatch, host):
    monkeypatch.setenv("RAG_SERVICE_API_PUBLIC_URL", f"http://{host}/")
    assert load_settings().api.public_url == f"http://{host}"
    for other in ("rag.example.com", "10.0.0.7", "127.0.0.1.example.com"):
        monkeypatch.setenv("RAG_SERVICE_API_PUBLIC_URL", f"http://{other}")
        with pytest.raises(ConfigurationError, match=r"api\.public_url.*https://"):
            load_settings()


@pytest.mark.parametrize("url", ["http://hooks.example.com/s3cret", "hooks/s3cret", "ftp://s3cret"])
def test_alarms_need_https_and_the_error_does_not_show_the_address(monkeypatch, url):
    monkeypatch.setenv("RAG_SERVICE_NOTIFY_WEBHOOK_URL", url)
    with pytest.raises(ConfigurationError, match=r"notify\.webhook_url") as caught:
        load_settings()
    assert "s3cret" not in str(caught.value)


def test_samples_are_kept_longer_than_an_alarm_waits(monkeypatch):
    monkeypatch.setenv("RAG_SERVICE_OCCUPANCY_SAMPLE_RETENTION", "60")
    with pytest.raises(
        ConfigurationError, match=r"occupancy\.starved_after .* occupancy\.sample_retention"
    ):
        load_settings()


@pytest.mark.parametrize("name", ["https://api.runpod.ai/v2/abc", "abc/run", "a b", "abc?x=1", "ä"])
def test_an_endpoint_id_is_not_a_url_or_path(monkeypatch, name):
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
def test_everything_that_the_transport_needs_is_named_at_once(monkeypatch, variables, missing):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sentence = load_settings().unset_for_pages
    assert set(re.findall(r"\(([A-Z_]+)\)", sentence or "")) == missing


@pytest.mark.parametrize(("transport", "warns"), [("runpod", True), ("direct", False)])
def test_an_unused_base_url_is_warned_about(monkeypatch, caplog, transport, warns):
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
def test_regions_with_the_small_layout_model_are_warned_about(
    monkeypatch, caplog, layout, model, warns
):
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


def test_loaded_settings_cannot_be_changed():
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.ocr.dpi = 300
    with pytest.raises(ValueError, match="frozen"):
        settings.log_level = "DEBUG"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


@given(option=st.sampled_from(options()), text=TEXT)
@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_accepted_or_refused_with_the_key(option, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(option.env, text)
        try:
            load_settings()
        except ConfigurationError as error:
            message = str(error)
        else:
            message = option.key
    assert option.key in message


def mentions_a_secret(annotation):
    return annotation is SecretStr or any(map(mentions_a_secret, get_args(annotation)))


def test_secret_options_are_those_typed_as_secrets():
    typed = {
        (model.__name__, name)
        for model in sections()
        for name, field in model.model_fields.items()
        if mentions_a_secret(field.annotation)
    }
    assert len(typed) == len(SECRETS) > 0


@given(times=st.tuples(*[st.integers(1, 4)] * 3))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lease_times_must_rise_from_renewal_to_expiry(times, monkeypatch):
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
def test_a_servers_url_with_a_password_is_refused_without_showing_it(monkeypatch, user):
    monkeypatch.setenv("GLMOCR_BASE_URL", f"http://{user}127.0.0.1:5002/v1")
    with pytest.raises(ConfigurationError, match="GLMOCR_API_KEY") as refused:
        load_settings()
    assert "s3cret" not in refused.value.message


@pytest.mark.parametrize("name", ["OCR_WORKER_CONCURRENCY", "GLMOCR_PIPELINE_MAX_WORKERS"])
def test_a_million_forks_or_pages_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "1000000")
    with pytest.raises(ConfigurationError, match="1024"):
        load_settings()


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", "1e9", "1025"])
def test_neither_a_number_nor_auto_is_refused_in_one_sentence(monkeypatch, value):
    monkeypatch.setenv("GLMOCR_PIPELINE_MAX_WORKERS", value)
    with pytest.raises(ConfigurationError) as refused:
        load_settings()
    assert refused.value.message.count("GLMOCR_PIPELINE_MAX_WORKERS") == 1
    assert "must be a whole number from 1 to 1024, or auto" in refused.value.message
    assert "Value error" not in refused.value.message


def test_the_renamed_options_have_their_old_names():
    assert {option.old_key: option.key for option in RENAMED} == {
        "layout.patience": "layout.outage_limit",
        "memory_guard.least_available_mib": "memory_guard.min_available_mib",
        "occupancy.keep": "occupancy.sample_retention",
        "runpod.execution_base": "runpod.execution_timeout_base",
        "runpod.execution_per_page": "runpod.execution_timeout_per_page",
        "worker.deaf_after": "worker.idle_restart_after",
    }
    current = {name for option in options() for name in (option.key, option.env)}
    assert current.isdisjoint({name for o in RENAMED for name in (o.old_key, o.old_env)})


@pytest.mark.parametrize("option", RENAMED, ids=lambda option: option.key)
def test_an_old_key_in_a_file_works_with_one_warning(option, own_file, caplog):
    own_file(yaml.safe_dump({option.old_path[0]: {option.old_path[1]: 86399}}))
    for _ in range(2):
        assert value_of(load_settings(), option) == 86399
    warning = f"{option.old_key} is now {option.key}; the old name still works"
    assert caplog.messages == [warning]


@pytest.mark.parametrize("option", RENAMED, ids=lambda option: option.key)
def test_an_old_variable_works_with_one_warning(option, monkeypatch, caplog):
    monkeypatch.setenv(option.old_env, "86399")
    for _ in range(2):
        assert value_of(load_settings(), option) == 86399
    warning = f"{option.old_env} is now {option.env}; the old name still works"
    assert caplog.messages == [warning]
    assert unknown_variables(os.environ) == []
    assert loader.is_chosen(option.key)


def test_the_new_key_wins_over_the_old_one(own_file):
    own_file("worker:\n  deaf_after: 7\n  idle_restart_after: 8\n")
    assert load_settings().worker.idle_restart_after == 8


def test_the_new_variable_wins_over_the_old_one(monkeypatch, caplog):
    loader._warn_of_ignored_name.cache_clear()
    monkeypatch.setenv("RAG_SERVICE_WORKER_DEAF_AFTER", "7")
    monkeypatch.setenv("RAG_SERVICE_WORKER_IDLE_RESTART_AFTER", "8")
    assert load_settings().worker.idle_restart_after == 8
    assert "RAG_SERVICE_WORKER_DEAF_AFTER is ignored" in caplog.text
    assert "still works" not in caplog.text


def test_an_old_variable_wins_over_the_new_key_in_a_file(monkeypatch, own_file):
    own_file("worker:\n  idle_restart_after: 8\n")
    monkeypatch.setenv("RAG_SERVICE_WORKER_DEAF_AFTER", "7")
    assert load_settings().worker.idle_restart_after == 7


def test_a_bad_value_under_an_old_name_is_reported_under_the_new_one(own_file):
    own_file("worker:\n  deaf_after: soon\n")
    with pytest.raises(ConfigurationError, match=r"worker\.idle_restart_after: must be seconds"):
        load_settings()


def test_children_get_the_new_names():
    given = {"RAG_SERVICE_WORKER_DEAF_AFTER": "7", "RAG_SERVICE_TYPO": "1", "HOME": "/h"}
    assert current_names(given) == {"RAG_SERVICE_WORKER_IDLE_RESTART_AFTER": "7", "HOME": "/h"}
    both = given | {"RAG_SERVICE_WORKER_IDLE_RESTART_AFTER": "8"}
    assert current_names(both)["RAG_SERVICE_WORKER_IDLE_RESTART_AFTER"] == "8"
