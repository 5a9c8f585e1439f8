"""Every option once: its type and meaning here, its default in config.yaml. Used by every process.

Order: packaged config.yaml < the file named by RAG_SERVICE_CONFIG < the environment.
An empty variable counts as unset; a secret may also come from a file named by NAME_FILE.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from rag_service.errors import ConfigurationError

log = logging.getLogger(__name__)

PACKAGED_CONFIG = Path(__file__).with_name("config.yaml")
PREFIXES = ("RAG_SERVICE_", "GLMOCR_", "OCR_", "RUNPOD_")
CONFIG_VARIABLE = "RAG_SERVICE_CONFIG"
# Read outside this tree: the config file's own name, and the CLI's secret for tests of `up`.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE})


def _known_as(name: str) -> dict[str, Any]:
    return {"env": name}


def _expand(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, str) else value


def _server(url: str) -> str:
    """One spelling for one server, since what is known of it is kept under its URL."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]


def _require_rising(prefix: str, **values: float) -> None:
    """ValueError, naming the keys, where one of the values is not below the next."""
    for (low, small), (high, large) in pairwise(values.items()):
        if small >= large:
            raise ValueError(
                f"{prefix}.{low} ({small:g}) must be below {prefix}.{high} ({large:g})"
            )


class Section(BaseModel):
    """A part of the tree; unknown keys stop the start-up."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Database(Section):
    url: SecretStr | None = Field(
        description="PostgreSQL URL; unset: `run` and `up` start their own.",
        json_schema_extra=_known_as("DATABASE_URL"),
    )
    pool_size: Count = Field(description="Connections a process keeps.")
    connect_timeout: Seconds = Field(description="Seconds to wait for a connection.")


class Redis(Section):
    url: SecretStr | None = Field(
        description="Redis or Valkey URL; unset: `run` and `up` start their own.",
        json_schema_extra=_known_as("REDIS_URL"),
    )
    visibility_timeout: Seconds = Field(
        description="Seconds after which an unacknowledged doorbell is delivered again."
    )


class Storage(Section):
    url: str | None = Field(
        description="Where document bytes live: s3://bucket/prefix or file:///folder; "
        "unset: a folder in data_dir."
    )


class Api(Section):
    url: str = Field(
        description="Where the commands find the service.",
        json_schema_extra=_known_as("RAG_SERVICE_URL"),
    )
    host: str = Field(description="Address to listen on; beyond loopback only with a key.")
    port: Port = Field(description="Port to listen on.")
    key: SecretStr | None = Field(
        description="The key that every request must carry as a bearer token.",
        json_schema_extra=_known_as("RAG_SERVICE_API_KEY"),
    )

    public_url: str | None = Field(
        description="Where RunPod reaches the API for its webhook; unset: none is asked for."
    )


class FlowerSettings(Section):
    host: str = Field(description="Address of Flower; beyond loopback only with credentials.")
    port: Port = Field(description="Port of Flower.")
    basic_auth: SecretStr | None = Field(description="user:password for Flower.")


class Limits(Section):
    max_bytes: Count = Field(description="Largest file accepted.")
    max_pages: Count = Field(description="Most pages a document may have.")
    max_backlog: Count = Field(description="Documents that may wait before new ones get 503.")


class ParserSettings(Section):
    default: str = Field(description="The parser used when a request names none.")


class Pdf(Section):
    page_time_limit: Seconds = Field(description="Seconds for one page's render or extraction.")
    open_time_limit: Seconds = Field(description="Seconds for opening a document.")
    max_pixels: Count = Field(description="Most pixels of a rendered page; the DPI is lowered.")
    jpeg_quality: Annotated[int, Field(ge=30, le=100)] = Field(
        description="JPEG quality of pages sent to the OCR server."
    )
    trust_hidden_text: bool = Field(
        description="Keep invisible text over a scan instead of reading the picture."
    )
    child_max_documents: Count = Field(description="Documents before a render child is replaced.")
    child_max_mib: Count = Field(description="Memory at which a render child is replaced.")
    downsample_oversized: bool = Field(
        description="Shrink the pictures of a scan that is too large to send.",
        json_schema_extra=_known_as("GLMOCR_DOWNSAMPLE_OVERSIZED"),
    )
    shrink_time_limit: Seconds = Field(description="Seconds for shrinking one document.")


class Ocr(Section):
    base_url: Annotated[str, AfterValidator(_server)] | None = Field(
        description="OpenAI-compatible OCR server (SGLang, vLLM, …), with or without /v1; "
        "unset: `run` and `up` start the CPU server.",
        json_schema_extra=_known_as("GLMOCR_BASE_URL"),
    )
    api_key: SecretStr | None = Field(
        description="Bearer token for the OCR server.",
        json_schema_extra=_known_as("GLMOCR_API_KEY"),
    )
    model: str = Field(
        description="Model name in requests.", json_schema_extra=_known_as("GLMOCR_MODEL")
    )
    worker_concurrency: Count = Field(
        description="Documents in flight: forks of the ocr worker.",
        json_schema_extra=_known_as("OCR_WORKER_CONCURRENCY"),
    )
    pages_in_flight: Count | Literal["auto"] = Field(
        description="Pages in flight a document: a number or `auto`.",
        json_schema_extra=_known_as("GLMOCR_PIPELINE_MAX_WORKERS"),
    )
    auto_pages_in_flight: Count = Field(description="What `auto` means for pages_in_flight.")
    max_tokens: Count = Field(
        description="Ceiling of generated tokens a page.",
        json_schema_extra=_known_as("OCR_MAX_TOKENS"),
    )
    dpi: Annotated[int, Field(ge=50, le=600)] = Field(description="Resolution pages are read at.")
    connect_timeout: Seconds = Field(description="Seconds to connect to the OCR server.")
    write_timeout: Seconds = Field(description="Seconds to send a page.")
    read_timeout: Seconds = Field(
        description="Seconds to wait for an answer; longer than the longest generation."
    )
    pool_timeout: Seconds = Field(description="Seconds to wait for a free connection.")
    probe_interval: Seconds = Field(description="Seconds between probes of a server in outage.")
    outage_limit: Seconds = Field(
        description="Seconds without an answered page until waiting documents fail."
    )
    transport: Literal["direct", "runpod"] = Field(
        description="direct: to ocr.base_url; runpod: jobs of pages to a serverless endpoint."
    )
    layout: Literal["page", "auto"] = Field(
        description="How the RunPod handler reads: whole pages, or as it sees fit."
    )


class RunPod(Section):
    api_base: str = Field(
        description="Base of RunPod's serverless API.",
        json_schema_extra=_known_as("RUNPOD_API_BASE"),
    )
    endpoint_id: str | None = Field(
        description="The endpoint that runs our handler.",
        json_schema_extra=_known_as("RUNPOD_ENDPOINT_ID"),
    )
    api_key: SecretStr | None = Field(
        description="RunPod's API key.", json_schema_extra=_known_as("RUNPOD_API_KEY")
    )
    connect_timeout: Seconds = Field(description="Seconds to connect to RunPod.")
    request_timeout: Seconds = Field(description="Seconds of silence until a request is given up.")
    max_body_bytes: Count = Field(description="Largest JSON body of a job; RunPod takes 10 MB.")
    max_pages_per_job: Count = Field(description="Most pages of a job.")
    workers: Count = Field(
        description="The endpoint's most workers: a document is split to use them all."
    )
    max_live_jobs: Count = Field(description="Live jobs of the endpoint before none is posted.")
    poll_window: Seconds = Field(
        description="Seconds a fork follows its jobs before it goes to another document."
    )
    poll_min: Seconds = Field(description="Least seconds between polls of a job.")
    poll_max: Seconds = Field(description="Most seconds between polls of a job.")
    execution_base: Seconds = Field(description="executionTimeout of a job: this …")
    execution_per_page: Seconds = Field(description="… and this for each page, in seconds.")
    ttl: Seconds = Field(description="Seconds from the post until RunPod drops a job.")
    deadline_margin: Seconds = Field(
        description="Seconds before a job's ttl at which it is cancelled."
    )
    visible_after: Seconds = Field(
        description="Age in seconds under which a job that RunPod does not know may yet appear."
    )
    repost_after: Seconds = Field(
        description="Seconds after a lost answer until the one repost, where the handler has "
        "a volume."
    )
    handler_volume: bool = Field(
        description="Whether the endpoint has a network volume, on which a request's work is "
        "done once."
    )
    no_worker_alarm: Seconds = Field(
        description="Seconds a job may queue with no worker until health is degraded."
    )
    usd_per_gpu_second: Annotated[float, Field(ge=0)] = Field(
        description="Price of the endpoint's GPU, for the cost's lower bound."
    )


class Handler(Section):
    engine: str = Field(
        description="What the RunPod handler's image reads pages with.",
        json_schema_extra=_known_as("GLMOCR_ENGINE"),
    )
    volume: Annotated[Path, BeforeValidator(_expand)] = Field(
        description="Folder on the endpoint's network volume for work done once; unused where "
        "the folder above it is missing.",
        json_schema_extra=_known_as("RUNPOD_HANDLER_VOLUME"),
    )
    skip_gpu_check: bool = Field(
        description="Start without looking for a GPU, for tests.",
        json_schema_extra=_known_as("RUNPOD_HANDLER_SKIP_GPU_CHECK"),
    )
    start_timeout: Seconds = Field(description="Seconds for the OCR server to come up.")
    heartbeat: Seconds = Field(description="Seconds between signs of life on the volume.")
    stale_after: Seconds = Field(
        description="Seconds without a sign of life until another worker takes a key's work over."
    )
    progress_every: Seconds = Field(description="Seconds between progress updates of a job.")
    max_output_bytes: Count = Field(description="Largest answer of a job; RunPod takes 10 MB.")
    max_document_bytes: Count = Field(description="Largest document of a job, fetched or unzipped.")
    download_timeout: Seconds = Field(description="Seconds for fetching a document by its URL.")


class CpuOcr(Section):
    host: str = Field(description="Address of the CPU OCR server.")
    port: Port = Field(description="Port of the CPU OCR server.")
    engine: Literal["tiny", "small"] = Field(
        description="tiny: fast; small: better on receipts, four times slower."
    )
    threads: Annotated[int, Field(ge=0)] = Field(description="Engine threads; 0: one a core.")
    max_pixels: Count = Field(description="Most pixels of a picture the CPU OCR server reads.")
    max_body_bytes: Count = Field(description="Largest request the CPU OCR server accepts.")


class Prepare(Section):
    worker_concurrency: Count = Field(
        description="Forks of the prepare worker; one of them is kept for interactive documents."
    )


class Retry(Section):
    waits: list[Annotated[float, Field(ge=0)]] = Field(
        description="Seconds between the requests of one page."
    )
    jitter: Annotated[float, Field(ge=0, lt=1)] = Field(description="Share of ± on each wait.")
    later_wait: Seconds = Field(description="Seconds until a page's one later try.")


class Lease(Section):
    seconds: Seconds = Field(description="How long a worker's claim on a run lasts.")
    renew_every: Seconds = Field(description="Seconds between renewals.")
    give_up_after: Seconds = Field(description="Seconds without renewal until the owner stops.")
    crash_limit: Count = Field(description="Lost children without progress until worker_crashed.")
    expiry_limit: Count = Field(description="Expired leases without progress until then.")

    @model_validator(mode="after")
    def _in_order(self) -> Lease:
        """An owner must stop before another may claim its run, and have had time to renew."""
        _require_rising(
            "lease",
            renew_every=self.renew_every, give_up_after=self.give_up_after, seconds=self.seconds,
        )  # fmt: skip
        return self


class Worker(Section):
    soft_shutdown: Seconds = Field(description="Seconds a stopping worker has to store its pages.")
    deaf_after: Seconds = Field(
        description="Seconds without a doorbell, while runs wait for free forks, until a restart."
    )


class DocumentTimeoutSettings(Section):
    base: Seconds = Field(description="Seconds of work every document may take.")
    per_page: Seconds = Field(description="Seconds more for each page.")


class Maintenance(Section):
    interval: Seconds = Field(description="Seconds between rounds.")
    lease: Seconds = Field(description="Seconds the holder's lease lasts.")


class Embedded(Section):
    worker_concurrency: Count = Field(
        description="ocr.worker_concurrency where the OCR server is the embedded one."
    )
    pages_in_flight: Count = Field(
        description="ocr.pages_in_flight where the OCR server is the embedded one."
    )


class Settings(BaseSettings):
    """The whole tree. Build it with load_settings() or get_settings()."""

    model_config = ConfigDict(extra="forbid", frozen=True)  # type: ignore[assignment]

    data_dir: Annotated[Path, BeforeValidator(_expand)] = Field(
        description="Folder for documents and the embedded servers' data."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(description="Log level.")
    database: Database
    redis: Redis
    storage: Storage
    api: Api
    flower: FlowerSettings
    limits: Limits
    parser: ParserSettings
    pdf: Pdf
    ocr: Ocr
    runpod: RunPod
    handler: Handler
    cpu_ocr: CpuOcr
    prepare: Prepare
    retry: Retry
    lease: Lease
    worker: Worker
    document_timeout: DocumentTimeoutSettings
    maintenance: Maintenance
    embedded: Embedded

    @property
    def page_server(self) -> str | None:
        """Where pages go: the OCR server, or the RunPod endpoint; None where none is set."""
        if self.ocr.transport == "direct":
            return self.ocr.base_url
        if self.runpod.endpoint_id is None:
            return None
        return f"{self.runpod.api_base.rstrip('/')}/{self.runpod.endpoint_id}"

    @property
    def needs_ocr_server(self) -> bool:
        """Whether `run` and `up` start the CPU server, because no other is named."""
        return self.ocr.transport == "direct" and self.ocr.base_url is None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        *_ignored: PydanticBaseSettingsSource,
        **_unused: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Later sources lose: environment, then the merged files."""
        return (_EnvironmentSource(settings_cls), _FileSource(settings_cls))


class _FileSource(PydanticBaseSettingsSource):
    """The packaged file with the user's own merged over it, key by key."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return field.default, field_name, False

    def __call__(self) -> dict[str, Any]:
        return _merge(_read_yaml(PACKAGED_CONFIG), _own_file())


class _EnvironmentSource(PydanticBaseSettingsSource):
    """Each leaf's variable, or the file that NAME_FILE points to for a secret."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return field.default, field_name, False

    def __call__(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for option in options():
            value = _from_environment(option)
            if value is not None:
                _put(tree, option.path, value)
        return tree


class Option(BaseModel):
    """One leaf of the tree, for the environment and the README's table."""

    path: tuple[str, ...]
    env: str
    secret: bool
    is_list: bool
    default: Any
    description: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


@cache
def options() -> tuple[Option, ...]:
    """Every leaf setting in the file's order."""
    return tuple(_walk(Settings, (), _read_yaml(PACKAGED_CONFIG)))


def _walk(model: type[BaseModel], path: tuple[str, ...], defaults: Any) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        here = (*path, name)
        default = (defaults or {}).get(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, here, default)
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        env = str(extra.get("env") or "RAG_SERVICE_" + "_".join(here).upper())
        secret = SecretStr in get_args(field.annotation)
        yield Option(
            path=here, env=env, secret=secret, is_list=isinstance(default, list),
            default=default, description=field.description or "",
        )  # fmt: skip


def _from_environment(option: Option) -> Any:
    value: Any = os.environ.get(option.env) or None
    if value is None and option.secret and (file := os.environ.get(option.env + "_FILE")):
        try:
            value = Path(file).read_text().strip() or None
        except OSError as error:
            raise ConfigurationError(f"{option.env}_FILE: cannot read {file}: {error}") from error
    if value is not None and option.is_list:
        return [part.strip() for part in str(value).split(",")]
    return value


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: the file must hold keys and values.")
    return tree


def _merge(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Own values over base ones; a section that is left empty keeps the base's."""
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        if isinstance(below, dict) and (value is None or isinstance(value, Mapping)):
            merged[key] = _merge(below, value or {})
        else:
            merged[key] = value
    return merged


def _own_file() -> dict[str, Any]:
    own = os.environ.get(CONFIG_VARIABLE)
    return _read_yaml(Path(own).expanduser()) if own else {}


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _refuse_secrets_in_file() -> None:
    tree = _own_file()
    for option in options():
        if option.secret and _at(tree, option.path) is not None:
            raise ConfigurationError(
                f"{option.key}: a secret does not belong in a config file. "
                f"Set {option.env}, or {option.env}_FILE to a file that holds it."
            )


def is_chosen(key: str) -> bool:
    """Whether the environment or the user's own file sets this option."""
    option = next(option for option in options() if option.key == key)
    chosen = _from_environment(option)
    return chosen is not None or _at(_own_file(), option.path) is not None


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Names that begin with one of our prefixes and mean nothing here."""
    known = _known_variables()
    return sorted(n for n in environment if n.startswith(PREFIXES) and n not in known)


def _known_variables() -> set[str]:
    known = {option.env for option in options()} | OTHER_VARIABLES
    return known | {option.env + "_FILE" for option in options() if option.secret}


def warn_of_unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Log each of unknown_variables() with the name that may have been meant."""
    unknown = unknown_variables(environment)
    for name in unknown:
        near = difflib.get_close_matches(name, _known_variables(), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        log.warning("The variable %s is not a setting of rag_service.%s", name, hint)
    return unknown


def load_settings() -> Settings:
    """Read files and environment afresh.

    Raises ConfigurationError that names every bad key and where it can be set.
    """
    _refuse_secrets_in_file()
    try:
        return Settings()  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigurationError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    by_key = {option.key: option for option in options()}
    lines = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"]]
        option = next((by_key[k] for k in _prefixes(parts) if k in by_key), None)
        where = f" (environment: {option.env})" if option else ""
        lines.append(f"{option.key if option else '.'.join(parts)}: {problem['msg']}{where}")
    return "Bad settings: " + "; ".join(dict.fromkeys(lines))


def _prefixes(parts: list[str]) -> Iterator[str]:
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])


@cache
def get_settings() -> Settings:
    """The process's settings, read once."""
    return load_settings()
