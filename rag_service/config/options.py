"""The parts of the settings: each option's type and meaning. Put together in settings.py."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from rag_service.config.hosts import is_loopback
from rag_service.states import LAYOUT_LABELS, LayoutMode


def _expand(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, str) else value


Folder = Annotated[Path, BeforeValidator(_expand)]
Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]
# More is a slip of the keyboard: no server batches so many, no machine has so many forks.
_MOST_AT_ONCE = 1024
Forks = Annotated[int, Field(ge=1, le=_MOST_AT_ONCE)]
# sun_path holds 104 bytes on macOS and 108 on Linux, the final NUL included.
LONGEST_SOCKET_PATH = 103


def _known_as(name: str) -> dict[str, Any]:
    return {"env": name}


def _count_or_auto(value: Any) -> Any:
    """One sentence in place of one for each type that it may have."""
    text = str(value).strip()
    if text == "auto" or (text.isdecimal() and 1 <= int(text) <= _MOST_AT_ONCE):
        return value
    raise ValueError(f"must be a whole number from 1 to {_MOST_AT_ONCE}, or auto")


def _address(url: str) -> str:
    """One spelling for one address: without a slash at its end."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must begin with http:// or https:// and name a host")
    if parts.port == 0:
        raise ValueError("port 0 is none")
    return url.rstrip("/")


def _server(url: str) -> str:
    """One spelling for one server, since what is known of it is kept, and shown, under its URL."""
    if "@" in urlsplit(url).netloc:
        raise ValueError("must carry no user and password; a bearer token goes to GLMOCR_API_KEY")
    return _address(url).removesuffix("/v1")


def _public(url: str) -> str:
    """Tokens travel to it: in the clear they stay on this machine."""
    parts = urlsplit(_address(url))
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ValueError("must begin with https:// (http:// is for loopback alone)")
    return url.rstrip("/")


def _endpoint(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError("must be the endpoint's id alone, letters and digits, no URL or path")
    return name


def _socket(path: Path) -> Path:
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise ValueError(f"a socket's path has at most {LONGEST_SOCKET_PATH} bytes")
    return path


def _label(name: str) -> str:
    if name not in LAYOUT_LABELS:
        raise ValueError(f"{name!r} is no label; there are: {', '.join(LAYOUT_LABELS)}")
    return name


Labels = list[Annotated[str, AfterValidator(_label)]]


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


class DatabaseOptions(Section):
    url: SecretStr | None = Field(
        description="PostgreSQL URL; unset: `run` and `up` start their own.",
        json_schema_extra=_known_as("DATABASE_URL"),
    )
    pool_size: Count = Field(description="Connections a process keeps.")
    connect_timeout: Seconds = Field(description="Seconds to wait for a connection.")


class RedisOptions(Section):
    url: SecretStr | None = Field(
        description="Redis or Valkey URL; unset: `run` and `up` start their own.",
        json_schema_extra=_known_as("REDIS_URL"),
    )
    visibility_timeout: Seconds = Field(
        description="Seconds after which an unacknowledged doorbell is delivered again."
    )


class StorageOptions(Section):
    url: str | None = Field(
        description="Where document bytes live: s3://bucket/prefix or file:///folder; "
        "unset: a folder in data_dir."
    )


class ApiOptions(Section):
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

    public_url: Annotated[str, AfterValidator(_public)] | None = Field(
        description="Where RunPod reaches the API for its webhook, https://…; unset: none is "
        "asked for."
    )


class FlowerOptions(Section):
    host: str = Field(description="Address of Flower; beyond loopback only with credentials.")
    port: Port = Field(description="Port of Flower.")
    basic_auth: SecretStr | None = Field(description="user:password for Flower.")


class LimitsOptions(Section):
    max_bytes: Count = Field(description="Largest file accepted.")
    max_pages: Count = Field(description="Most pages a document may have.")
    max_backlog: Count = Field(description="Documents that may wait before new ones get 503.")


class ParserOptions(Section):
    default: str = Field(description="The parser used when a request names none.")


class PdfOptions(Section):
    page_time_limit: Seconds = Field(description="Seconds for one page's render or extraction.")
    open_time_limit: Seconds = Field(description="Seconds for opening a document.")
    max_pixels: Count = Field(description="Most pixels of a rendered page; the DPI is lowered.")
    jpeg_quality: Annotated[int, Field(ge=30, le=100)] = Field(
        description="JPEG quality of pages and crops sent to the OCR server."
    )
    crop_min_pixels: Count = Field(
        description="Least pixels of a crop sent to the OCR server; smaller ones are enlarged."
    )
    crop_max_side: Annotated[int, Field(ge=448)] = Field(
        description="Most pixels of a crop's longer side."
    )
    raster_cache_mib: Count = Field(
        description="Memory a render child keeps of drawn pages whose crops are still to come."
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


class OcrOptions(Section):
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
    worker_concurrency: Forks = Field(
        description="Documents in flight: forks of the ocr worker.",
        json_schema_extra=_known_as("OCR_WORKER_CONCURRENCY"),
    )
    pages_in_flight: Annotated[Count | Literal["auto"], BeforeValidator(_count_or_auto)] = Field(
        description="Pages in flight a document: a number or `auto`.",
        json_schema_extra=_known_as("GLMOCR_PIPELINE_MAX_WORKERS"),
    )
    objective: Literal["throughput", "latency"] = Field(
        description="What `auto` looks for: most pages an hour, or short answers at nine tenths "
        "of that."
    )
    server_share: Annotated[float, Field(gt=0, le=1)] = Field(
        description="The share of what `auto` finds that is used; below 1 where a chat model "
        "shares the server."
    )
    max_in_flight: Count | None = Field(
        description="Requests that all processes together may have open on the OCR server; unset: "
        "no bound."
    )
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
    layout: LayoutMode = Field(
        description="page: whole pages; regions: block by block; auto: whole pages, and block by "
        "block where a whole reading is cut, loops or comes back empty."
    )


class LayoutOptions(Section):
    url: Annotated[str, AfterValidator(_server)] | None = Field(
        description="A layout server elsewhere, http://host:port; unset: the ocr worker starts "
        "one for its node."
    )
    socket: Annotated[Folder, AfterValidator(_socket)] | None = Field(
        description="Socket of the node's layout server, on a disk of the node; unset: in data_dir."
    )
    host: str | None = Field(
        description="Address on which `layout-server` listens, in a container of its own; unset: "
        "on the socket."
    )
    port: Port = Field(description="Port of `layout-server` where layout.host is set.")
    model: Literal["cdla", "pp_doclayout_v3"] = Field(
        description="cdla: small, 10 kinds of blocks; pp_doclayout_v3: 25 kinds and the reading "
        "order, needs the extra layout-torch."
    )
    folder: Folder | None = Field(description="Folder with the weights of pp_doclayout_v3.")
    repo: Annotated[str, AfterValidator(_server)] = Field(
        description="Where the RunPod handler downloads missing weights from: a repository of "
        "Hugging Face or of a mirror."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        description="What pp_doclayout_v3 runs on; auto: cuda where there is one."
    )
    threads: Annotated[int, Field(ge=0)] = Field(description="Threads of the model; 0: one a core.")
    batch_size: Count = Field(description="Most pictures given to the model at once.")
    batch_wait: Annotated[float, Field(ge=0)] = Field(
        description="Seconds to wait for a fuller batch."
    )
    max_waiting: Count = Field(description="Requests that may wait before new ones get 429.")
    max_body_bytes: Count = Field(description="Largest picture the layout server accepts.")
    patience: Seconds = Field(
        description="Seconds without an answer of the layout server until a page fails."
    )
    start_timeout: Seconds = Field(description="Seconds for the layout server to load its model.")
    table: Labels = Field(description="Blocks read as tables.")
    formula: Labels = Field(description="Blocks read as formulas.")
    picture: Labels = Field(description="Blocks kept as pictures.")
    drop: Labels = Field(description="Blocks left out. All others are read as text.")

    @model_validator(mode="after")
    def _one_task_a_label(self) -> LayoutOptions:
        named = [*self.table, *self.formula, *self.picture, *self.drop]
        twice = sorted({label for label in named if named.count(label) > 1})
        if twice:
            raise ValueError(
                f"layout: {', '.join(twice)} may stand in one of table, formula, picture and drop"
            )
        return self


class RunPodOptions(Section):
    api_base: Annotated[str, AfterValidator(_address)] = Field(
        description="Base of RunPod's serverless API.",
        json_schema_extra=_known_as("RUNPOD_API_BASE"),
    )
    endpoint_id: Annotated[str, AfterValidator(_endpoint)] | None = Field(
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


class HandlerOptions(Section):
    engine: str = Field(
        description="What the RunPod handler's image reads pages with.",
        json_schema_extra=_known_as("GLMOCR_ENGINE"),
    )
    volume: Folder = Field(
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


class CpuOcrOptions(Section):
    host: str = Field(description="Address of the CPU OCR server.")
    port: Port = Field(description="Port of the CPU OCR server.")
    engine: Literal["tiny", "small"] = Field(
        description="tiny: fast; small: better on receipts, four times slower."
    )
    threads: Annotated[int, Field(ge=0)] = Field(description="Engine threads; 0: one a core.")
    max_pixels: Count = Field(description="Most pixels of a picture the CPU OCR server reads.")
    max_body_bytes: Count = Field(description="Largest request the CPU OCR server accepts.")


class PrepareOptions(Section):
    worker_concurrency: Forks = Field(
        description="Forks of the prepare worker; one of them is kept for interactive documents."
    )


class RetryOptions(Section):
    waits: list[Annotated[float, Field(ge=0)]] = Field(
        description="Seconds between the requests of one page."
    )
    jitter: Annotated[float, Field(ge=0, lt=1)] = Field(description="Share of ± on each wait.")
    later_wait: Seconds = Field(description="Seconds until a page's one later try.")


class LeaseOptions(Section):
    seconds: Seconds = Field(description="How long a worker's claim on a run lasts.")
    renew_every: Seconds = Field(description="Seconds between renewals.")
    give_up_after: Seconds = Field(description="Seconds without renewal until the owner stops.")
    crash_limit: Count = Field(description="Lost children without progress until worker_crashed.")
    expiry_limit: Count = Field(description="Expired leases without progress until then.")

    @model_validator(mode="after")
    def _in_order(self) -> LeaseOptions:
        """An owner must stop before another may claim its run, and have had time to renew."""
        _require_rising(
            "lease",
            renew_every=self.renew_every, give_up_after=self.give_up_after, seconds=self.seconds,
        )  # fmt: skip
        return self


class WorkerOptions(Section):
    soft_shutdown: Seconds = Field(description="Seconds a stopping worker has to store its pages.")
    deaf_after: Seconds = Field(
        description="Seconds without a doorbell, while runs wait for free forks, until a restart."
    )


class DocumentTimeoutOptions(Section):
    base: Seconds = Field(description="Seconds of work every document may take.")
    per_page: Seconds = Field(description="Seconds more for each page.")


class MaintenanceOptions(Section):
    interval: Seconds = Field(description="Seconds between rounds.")
    lease: Seconds = Field(description="Seconds the holder's lease lasts.")


class OccupancyOptions(Section):
    sample_every: Seconds = Field(description="Seconds between looks at the OCR server's gauges.")
    starved_after: Seconds = Field(
        description="Seconds that a server must be starved until the alarm is raised."
    )
    keep: Seconds = Field(description="Seconds that samples are kept.")
    slots: Count | None = Field(
        description="Requests that the OCR server can batch; unset: SGLang says it, and else the "
        "most that ran while others waited."
    )

    @property
    def fresh(self) -> float:
        """Seconds after which a sample says nothing of now: maintenance has stopped."""
        return 8 * self.sample_every

    @model_validator(mode="after")
    def _in_order(self) -> OccupancyOptions:
        """An alarm is judged by samples that must not be gone by then."""
        _require_rising(
            "occupancy",
            sample_every=self.sample_every, starved_after=self.starved_after, keep=self.keep,
        )  # fmt: skip
        return self


class NotifyOptions(Section):
    webhook_url: SecretStr | None = Field(
        description="Where alarms are posted as JSON: https, or http to loopback."
    )

    @field_validator("webhook_url")
    @classmethod
    def _stays_private(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            _public(url.get_secret_value())
        return url


class MemoryGuardOptions(Section):
    enabled: bool = Field(
        description="Begin no more OCR while this machine is short of memory; for machines whose "
        "GPU shares it."
    )
    least_available_mib: Count = Field(description="Short of memory is less than so many MiB.")


class EmbeddedOptions(Section):
    worker_concurrency: Forks = Field(
        description="ocr.worker_concurrency where the OCR server is the embedded one."
    )
    pages_in_flight: Count = Field(
        description="ocr.pages_in_flight where the OCR server is the embedded one."
    )
