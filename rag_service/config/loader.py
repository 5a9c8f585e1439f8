"""Every option once: its type and meaning in sections.py, its default in config.yaml.

Used by every process. Packaged config.yaml < the file of RAG_SERVICE_CONFIG < the environment.
An empty variable counts as unset; a secret may also come from a file named by NAME_FILE.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from rag_service.config.options import (
    ApiOptions,
    CpuOcrOptions,
    DatabaseOptions,
    DocumentTimeoutOptions,
    EmbeddedOptions,
    FlowerOptions,
    Folder,
    HandlerOptions,
    LayoutOptions,
    LeaseOptions,
    LimitsOptions,
    MaintenanceOptions,
    MemoryGuardOptions,
    NotifyOptions,
    OccupancyOptions,
    OcrOptions,
    ParserOptions,
    PdfOptions,
    PrepareOptions,
    RedisOptions,
    RetryOptions,
    RunPodOptions,
    Section,
    StorageOptions,
    WorkerOptions,
)
from rag_service.errors import ConfigurationError
from rag_service.states import LayoutMode

log = logging.getLogger(__name__)

PACKAGED_CONFIG = Path(__file__).with_name("config.yaml")
PREFIXES = ("RAG_SERVICE_", "GLMOCR_", "OCR_", "RUNPOD_")
CONFIG_VARIABLE = "RAG_SERVICE_CONFIG"
# Read outside this tree: the config file's own name.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE})


class Settings(BaseSettings):
    """The whole tree. Build it with load_settings() or get_settings()."""

    model_config = ConfigDict(extra="forbid", frozen=True)  # type: ignore[assignment]

    data_dir: Folder = Field(description="Folder for documents and the embedded servers' data.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(description="Log level.")
    database: DatabaseOptions
    redis: RedisOptions
    storage: StorageOptions
    api: ApiOptions
    flower: FlowerOptions
    limits: LimitsOptions
    parser: ParserOptions
    pdf: PdfOptions
    ocr: OcrOptions
    layout: LayoutOptions
    runpod: RunPodOptions
    handler: HandlerOptions
    cpu_ocr: CpuOcrOptions
    prepare: PrepareOptions
    retry: RetryOptions
    lease: LeaseOptions
    worker: WorkerOptions
    document_timeout: DocumentTimeoutOptions
    maintenance: MaintenanceOptions
    occupancy: OccupancyOptions
    notify: NotifyOptions
    memory_guard: MemoryGuardOptions
    embedded: EmbeddedOptions

    @property
    def page_server(self) -> str | None:
        """Where pages go: the OCR server, or the RunPod endpoint; None where none is set."""
        if self.ocr.transport == "direct":
            return self.ocr.base_url
        if self.runpod.endpoint_id is None:
            return None
        return f"{self.runpod.api_base}/{self.runpod.endpoint_id}"

    @property
    def unset_for_pages(self) -> str | None:
        """What must be set before pages can travel as ocr.transport says; None where all is."""
        needed = (
            {"ocr.base_url is not set (GLMOCR_BASE_URL)": self.ocr.base_url}
            if self.ocr.transport == "direct"
            else {
                "runpod.endpoint_id is not set (RUNPOD_ENDPOINT_ID)": self.runpod.endpoint_id,
                "runpod.api_key is not set (RUNPOD_API_KEY)": self.runpod.api_key,
            }
        )
        missing = [sentence for sentence, value in needed.items() if value is None]
        return f"ocr.transport is {self.ocr.transport}: {', '.join(missing)}." if missing else None

    @property
    def needs_ocr_server(self) -> bool:
        """Whether `run` and `up` start the CPU server, because no other is named."""
        return self.ocr.transport == "direct" and self.ocr.base_url is None

    @property
    def uses_layout(self) -> bool:
        """Whether our own workers may read pages block by block."""
        return self.ocr.transport == "direct" and self.ocr.layout is not LayoutMode.PAGE

    @property
    def needs_layout_server(self) -> bool:
        """Whether a node that reads pages starts a layout server, because no other is named."""
        return self.uses_layout and self.layout.url is None

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


def warn_of_doubtful_settings(settings: Settings) -> None:
    """Log what is allowed and hardly meant; once, where pages are about to be read."""
    if settings.ocr.transport == "runpod" and settings.ocr.base_url is not None:
        log.warning(
            "ocr.transport is runpod: pages go to the RunPod endpoint, and ocr.base_url "
            "(GLMOCR_BASE_URL) is not used."
        )
    if settings.ocr.layout == LayoutMode.REGIONS and settings.layout.model == "cdla":
        log.warning(
            "ocr.layout is regions and layout.model is cdla, whose boxes are too narrow on some "
            "pages: what they do not hold is lost. Take pp_doclayout_v3 "
            "(RAG_SERVICE_LAYOUT_MODEL), or RAG_SERVICE_OCR_LAYOUT=auto."
        )


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
        lines.append(f"{option.key if option else '.'.join(parts)}: {in_words(problem)}{where}")
    return "Bad settings: " + "; ".join(dict.fromkeys(lines))


def in_words(problem: Mapping[str, Any]) -> str:
    """What pydantic says of a value, without its own name for the kind of error."""
    said: str = problem["msg"]
    return said.removeprefix("Value error, ")


def _prefixes(parts: list[str]) -> Iterator[str]:
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])


@cache
def get_settings() -> Settings:
    """The process's settings, read once."""
    return load_settings()
