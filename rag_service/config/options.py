"""The tree of options: type, validation, description, names and area of each.

Defaults are in config.yaml; loader.py reads the values.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from rag_service.config.option_types import (
    Bytes,
    Count,
    CountOrAuto,
    EndpointId,
    Folder,
    Forks,
    Labels,
    Mebibytes,
    Port,
    PrivateUrl,
    Seconds,
    SecondsOrZero,
    SecretPrivateUrl,
    ServerUrl,
    SocketPath,
    Token,
    Url,
    require_rising,
)
from rag_service.states import LayoutMode


def common(description: str, *, env: str | None = None, was: str | None = None) -> Any:
    """Return the field of an option that people set.

    `env` replaces the variable's derived name; `was` is the option's former key.
    """
    return _field(description, env, was, expert=False)


def expert(description: str, *, env: str | None = None, was: str | None = None) -> Any:
    """Return the field of an option that hardly anyone needs to set; see common()."""
    return _field(description, env, was, expert=True)


def _field(description: str, env: str | None, was: str | None, *, expert: bool) -> Any:
    return Field(
        description=description, json_schema_extra={"env": env, "was": was, "expert": expert}
    )


class Section(BaseModel):
    """A part of the tree. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # The heading in docs/settings.md; neighbouring sections may share one.
    area: ClassVar[str]


class DatabaseOptions(Section):
    """The connection to PostgreSQL."""

    area = "Database, broker and storage"

    url: SecretStr | None = common(
        "PostgreSQL URL. If unset, `run` and `up` start their own PostgreSQL.", env="DATABASE_URL"
    )
    pool_size: Count = expert(
        "Database connections that the API keeps open; when busy it opens up to 20 more."
    )
    connect_timeout: Seconds = expert("Seconds to wait for a connection.")


class RedisOptions(Section):
    """The connection to the broker."""

    area = DatabaseOptions.area

    url: SecretStr | None = common(
        "Redis or Valkey URL. If unset, `run` and `up` start their own Valkey.", env="REDIS_URL"
    )
    visibility_timeout: Seconds = expert(
        "Seconds after which an unacknowledged wake-up message is delivered again."
    )


class StorageOptions(Section):
    """The store of document bytes."""

    area = DatabaseOptions.area

    url: str | None = common(
        "Store of document bytes: s3://bucket/prefix or file:///folder. If unset, a folder in "
        "data_dir."
    )
    min_free_bytes: Bytes = common(
        "Free bytes of the disks for documents and data below which health reports them as low."
    )


class ApiOptions(Section):
    """The HTTP API and its clients."""

    area = "API and Flower"

    url: str = common("URL at which the commands find the API.", env="RAG_SERVICE_URL")
    host: str = common("Address that the API listens on; beyond loopback only with a key.")
    port: Port = common("Port that the API listens on.")
    key: Token | None = common(
        "Bearer token that every API request must have.", env="RAG_SERVICE_API_KEY"
    )
    public_url: PrivateUrl | None = common(
        "URL at which RunPod reaches the API for its webhook, https://…. If unset, no webhook is "
        "requested."
    )


class FlowerOptions(Section):
    """Flower, the monitor of Celery."""

    area = ApiOptions.area

    host: str = common("Address that Flower listens on; beyond loopback only with basic_auth.")
    port: Port = common("Port that Flower listens on.")
    basic_auth: SecretStr | None = common("Credentials for Flower, user:password.")


class LimitsOptions(Section):
    """What intake accepts."""

    area = "Intake"

    max_bytes: Bytes = common("Largest accepted file, in bytes.")
    max_pages: Count = common("Most pages of a document.")
    max_backlog: Count = common("Waiting documents of a priority above which its uploads get 503.")


class ParserOptions(Section):
    """Which parser reads pages."""

    area = LimitsOptions.area

    default: str = common("Parser to use if a request names none.")


class PdfOptions(Section):
    """Opening, extracting and rendering in the PDF child process."""

    area = "PDF"

    page_time_limit: Seconds = expert(
        "Seconds for a page: its drawing and its text together, or one rendering."
    )
    document_time_base: Seconds = expert(
        "Seconds of processor time that all pages of a document may take together, in each stage."
    )
    document_time_per_page: Seconds = expert("Additional seconds for each of its pages.")
    open_time_limit: Seconds = expert("Seconds to open a document.")
    max_pixels: Count = expert(
        "Most pixels of a rendered page. A larger page is rendered at a lower resolution."
    )
    jpeg_quality: Annotated[int, Field(ge=30, le=100)] = expert(
        "JPEG quality, 30 to 100, of pages and crops sent to the OCR server."
    )
    crop_min_pixels: Count = expert(
        "Fewest pixels of a crop sent to the OCR server. A smaller crop is enlarged."
    )
    crop_max_side: Annotated[int, Field(ge=448)] = expert(
        "Longest side of a crop, in pixels; at least 448."
    )
    raster_cache_mib: Mebibytes = expert(
        "MiB of rendered pages that a render child keeps for crops that are still to be cut."
    )
    trust_hidden_text: bool = common(
        "Keep the invisible text over a scan instead of reading the picture."
    )
    child_max_documents: Count = expert("Documents after which a render child is replaced.")
    child_max_mib: Mebibytes = expert(
        "Most MiB of memory of a render child: one for each fork, up to three in the API. A page "
        "that needs more fails. At half of it the child is replaced."
    )
    downsample_oversized: bool = common(
        "Shrink the pictures of a scan that is too large for a RunPod job.",
        env="GLMOCR_DOWNSAMPLE_OVERSIZED",
    )
    shrink_time_limit: Seconds = expert("Seconds to shrink a document.")


class OcrOptions(Section):
    """The OCR server and how it is used."""

    area = "OCR"

    base_url: ServerUrl | None = common(
        "URL of the OCR server with an OpenAI-compatible API (SGLang, vLLM, …), with or without "
        "/v1. If unset, `run` and `up` start the CPU OCR server.",
        env="GLMOCR_BASE_URL",
    )
    api_key: Token | None = common("Bearer token for the OCR server.", env="GLMOCR_API_KEY")
    model: str = common("Model name sent to the OCR server.", env="GLMOCR_MODEL")
    worker_concurrency: Forks = common(
        "Documents in flight: the number of forks of the ocr worker.",
        env="OCR_WORKER_CONCURRENCY",
    )
    pages_in_flight: CountOrAuto = common(
        "Pages in flight for each document: a number, or `auto` to find it.",
        env="GLMOCR_PIPELINE_MAX_WORKERS",
    )
    objective: Literal["throughput", "latency"] = common(
        "Goal of `auto`: most pages per hour, or short response times at 90 % of that."
    )
    server_share: Annotated[float, Field(gt=0, le=1)] = common(
        "Share, above 0 and up to 1, of the number found by `auto` that is used. Below 1 if a chat "
        "model shares the server."
    )
    max_in_flight: Count | None = common(
        "Most requests that all processes together have open on the OCR server, but at least one "
        "for each fork. If unset, no limit."
    )
    max_tokens: Count = common("Most tokens generated for a page.", env="OCR_MAX_TOKENS")
    dpi: Annotated[int, Field(ge=50, le=600)] = common(
        "Resolution at which pages are rendered for OCR, 50 to 600 DPI."
    )
    connect_timeout: Seconds = expert("Seconds to connect to the OCR server.")
    write_timeout: Seconds = expert("Seconds to send a page to the OCR server.")
    read_timeout: Seconds = expert(
        "Seconds to wait for a response. Must be longer than the longest generation."
    )
    pool_timeout: Seconds = expert("Seconds to wait for a free connection.")
    probe_interval: Seconds = expert("Seconds between probes of an unreachable server.")
    outage_limit: Seconds = common(
        "Seconds without any page read by the server after which waiting documents fail."
    )
    transport: Literal["direct", "runpod"] = common(
        "direct: pages go to ocr.base_url; runpod: they go to a serverless endpoint as jobs."
    )
    layout: LayoutMode = common(
        "page: read whole pages; regions: read block by block; auto: read whole pages, and block "
        "by block if the text is cut off, repeats or is empty."
    )


class LayoutOptions(Section):
    """The layout server and its model."""

    area = "Layout"

    url: ServerUrl | None = common(
        "URL of a layout server, http://host:port. If unset, the ocr worker starts one for its "
        "machine."
    )
    socket: SocketPath | None = expert(
        "Socket of the machine's layout server, on a local disk. If unset, in data_dir."
    )
    host: str | None = expert(
        "Address that `layout-server` listens on if it runs in its own container. If unset, it "
        "listens on the socket."
    )
    port: Port = expert("Port of `layout-server` if layout.host is set.")
    model: Literal["cdla", "pp_doclayout_v3"] = common(
        "cdla: small, 10 kinds of blocks; pp_doclayout_v3: 25 kinds and the reading order, needs "
        "the extra `layout-torch`."
    )
    folder: Folder | None = common("Folder with the weights of pp_doclayout_v3.")
    repo: ServerUrl = expert(
        "URL of the repository, at Hugging Face or a mirror, from which the RunPod handler "
        "downloads missing weights."
    )
    device: Literal["auto", "cpu", "cuda"] = expert(
        "Device of pp_doclayout_v3. auto: cuda if available, else cpu."
    )
    threads: Annotated[int, Field(ge=0)] = expert("Threads of the model. 0: one per core.")
    batch_size: Count = expert("Most pictures in a batch of the model.")
    batch_wait: SecondsOrZero = expert("Seconds to wait for a fuller batch.")
    max_waiting: Count = expert("Waiting requests above which new ones get 429.")
    max_body_bytes: Bytes = expert("Largest picture that the layout server accepts, in bytes.")
    outage_limit: Seconds = expert(
        "Seconds without a response of the layout server after which a page fails.",
        was="layout.patience",
    )
    start_timeout: Seconds = expert("Seconds for the layout server to load its model.")
    table: Labels = expert("Labels of blocks that are read as tables.")
    formula: Labels = expert("Labels of blocks that are read as formulas.")
    picture: Labels = expert("Labels of blocks that are kept as pictures.")
    drop: Labels = expert("Labels of blocks that are left out. All others are read as text.")

    @model_validator(mode="after")
    def _check_one_task_per_label(self) -> LayoutOptions:
        named = [*self.table, *self.formula, *self.picture, *self.drop]
        twice = sorted({label for label in named if named.count(label) > 1})
        if twice:
            raise ValueError(
                f"layout: {', '.join(twice)} may be in only one of table, formula, picture, drop"
            )
        return self


class RunPodOptions(Section):
    """The RunPod endpoint and its jobs."""

    area = "RunPod"

    api_base: Url = expert("Base URL of RunPod's serverless API.", env="RUNPOD_API_BASE")
    endpoint_id: EndpointId | None = common(
        "Id of the endpoint that runs the handler image.", env="RUNPOD_ENDPOINT_ID"
    )
    api_key: Token | None = common("RunPod's API key.", env="RUNPOD_API_KEY")
    connect_timeout: Seconds = expert("Seconds to connect to RunPod.")
    request_timeout: Seconds = expert("Seconds without data after which a request is given up.")
    max_body_bytes: Bytes = expert(
        "Largest JSON body of a job, in bytes; RunPod accepts 10,000,000."
    )
    max_pages_per_job: Count = common("Most pages of a job.")
    workers: Count = common(
        "Most workers of the endpoint. A document is split into jobs to use all of them."
    )
    max_live_jobs: Count = common("Live jobs of the endpoint at which no further job is posted.")
    poll_window: Seconds = expert(
        "Seconds a fork polls the jobs of a document before it takes another document."
    )
    poll_min: Seconds = expert("Shortest time between polls of a job, in seconds.")
    poll_max: Seconds = expert("Longest time between polls of a job, in seconds.")
    execution_timeout_base: Seconds = expert(
        "Seconds of a job's execution timeout, in addition to the part for its pages.",
        was="runpod.execution_base",
    )
    execution_timeout_per_page: Seconds = expert(
        "Seconds of a job's execution timeout for each of its pages.",
        was="runpod.execution_per_page",
    )
    ttl: Seconds = expert("Seconds from the post after which RunPod drops a job.")
    deadline_margin: Seconds = expert("Seconds before the end of its ttl that a job is cancelled.")
    visible_after: Seconds = expert(
        "Seconds after the post during which a job that RunPod does not know may still appear."
    )
    repost_after: Seconds = expert(
        "Seconds between a lost answer and the one repost, if the handler has a volume."
    )
    max_posts_per_page: Count = expert(
        "Most posts of a page in a run, for whatever reasons; then the page fails."
    )
    handler_volume: bool = common(
        "Whether the endpoint has a network volume, which prevents doing a request's work twice."
    )
    no_worker_alarm: Seconds = expert(
        "Seconds that a job may queue without a worker before health is degraded."
    )
    usd_per_gpu_second: Annotated[float, Field(ge=0)] = common(
        "Price of the endpoint's GPU in US dollars per second, for the lower bound of costs."
    )


class HandlerOptions(Section):
    """The RunPod handler, which runs in the endpoint's image."""

    area = "RunPod handler"

    engine: str = common("OCR server in the handler's image.", env="GLMOCR_ENGINE")
    volume: Folder = common(
        "Folder for results on the endpoint's network volume. Unused if its parent folder does "
        "not exist.",
        env="RUNPOD_HANDLER_VOLUME",
    )
    skip_gpu_check: bool = expert(
        "Start without checking for a GPU, for tests.", env="RUNPOD_HANDLER_SKIP_GPU_CHECK"
    )
    start_timeout: Seconds = expert("Seconds for the OCR server to start.")
    heartbeat: Seconds = expert("Seconds between heartbeats on the volume.")
    stale_after: Seconds = expert(
        "Seconds without a heartbeat after which another worker takes over a request's work."
    )
    progress_every: Seconds = expert("Seconds between progress updates of a job.")
    max_output_bytes: Bytes = expert(
        "Largest response of a job, in bytes; RunPod accepts 10,000,000."
    )
    max_document_bytes: Bytes = expert(
        "Largest document of a job, downloaded or unzipped, in bytes."
    )
    download_timeout: Seconds = expert("Seconds to download a document from its URL.")


class CpuOcrOptions(Section):
    """The CPU OCR server."""

    area = "CPU OCR server"

    host: str = expert("Address that the CPU OCR server listens on.")
    port: Port = expert("Port that the CPU OCR server listens on.")
    engine: Literal["tiny", "small"] = common(
        "tiny: fast; small: better on receipts, four times slower."
    )
    threads: Annotated[int, Field(ge=0)] = expert("Threads of the engine. 0: one per core.")
    max_pixels: Count = expert("Most pixels of a picture that the CPU OCR server reads.")
    max_body_bytes: Bytes = expert("Largest request that the CPU OCR server accepts, in bytes.")


class PrepareOptions(Section):
    """The prepare worker."""

    area = "Workers, leases and retries"

    worker_concurrency: Forks = common(
        "Forks of the prepare worker. One of them is reserved for interactive documents."
    )


class RetryOptions(Section):
    """The retry schedule of page requests."""

    area = PrepareOptions.area

    waits: list[SecondsOrZero] = expert("Seconds between the requests of a page.")
    jitter: Annotated[float, Field(ge=0, lt=1)] = expert(
        "Random change of each wait, ± this share of it; below 1."
    )
    later_wait: Seconds = expert("Seconds until the one later try of a page.")


class LeaseOptions(Section):
    """The lease of a worker on a run."""

    area = PrepareOptions.area

    seconds: Seconds = expert("Seconds that a worker's lease on a run lasts.")
    renew_every: Seconds = expert("Seconds between renewals of a lease.")
    give_up_after: Seconds = expert("Seconds without a renewal after which the worker stops.")
    crash_limit: Count = expert("Lost forks without progress at which a run is `worker_crashed`.")
    expiry_limit: Count = expert(
        "Expired leases without progress at which a run is `worker_crashed`."
    )

    @model_validator(mode="after")
    def _check_order(self) -> LeaseOptions:
        """An owner must have time to renew, and must stop before another may claim its run."""
        require_rising(
            "lease",
            renew_every=self.renew_every, give_up_after=self.give_up_after, seconds=self.seconds,
        )  # fmt: skip
        return self


class WorkerOptions(Section):
    """Both kinds of workers."""

    area = PrepareOptions.area

    soft_shutdown: Seconds = expert("Seconds that a stopping worker has to store its pages.")
    turn: Seconds = expert(
        "Seconds after which a document gives its fork of the prepare worker to waiting documents. "
        "Its later turns are longer, up to six times."
    )
    held_after: Seconds = expert(
        "Seconds for which all forks of a stage must be held by the same documents, while others "
        "wait, until health is degraded."
    )
    idle_restart_after: Seconds = expert(
        "Seconds without a wake-up message, while runs wait for free forks, after which a worker "
        "restarts itself.",
        was="worker.deaf_after",
    )


class DocumentTimeoutOptions(Section):
    """The work time of a document, counted only while a fork holds its run."""

    area = PrepareOptions.area

    base: Seconds = expert("Seconds of work allowed for every document.")
    per_page: Seconds = expert("Additional seconds of work allowed for each page.")


class MaintenanceOptions(Section):
    """The maintenance process."""

    area = PrepareOptions.area

    interval: Seconds = expert("Seconds between rounds of maintenance.")
    lease: Seconds = expert("Seconds that the lease of the maintenance process lasts.")


class OccupancyOptions(Section):
    """Samples of the OCR server's gauges."""

    area = "Monitoring and memory"

    sample_every: Seconds = expert("Seconds between samples of the OCR server's gauges.")
    starved_after: Seconds = expert(
        "Seconds that a server must be starved before the alarm is raised."
    )
    sample_retention: Seconds = expert("Seconds that samples are kept.", was="occupancy.keep")
    slots: Count | None = expert(
        "Requests that the OCR server can batch. If unset, SGLang's own figure, else the most that "
        "ran while others waited."
    )

    @property
    def fresh(self) -> float:
        """The age in seconds beyond which a sample says nothing about now."""
        return 8 * self.sample_every

    @model_validator(mode="after")
    def _check_order(self) -> OccupancyOptions:
        """The samples that an alarm is based on must still exist."""
        require_rising(
            "occupancy",
            sample_every=self.sample_every,
            starved_after=self.starved_after,
            sample_retention=self.sample_retention,
        )
        return self


class NotifyOptions(Section):
    """Alarms for other systems."""

    area = OccupancyOptions.area

    webhook_url: SecretPrivateUrl | None = common(
        "URL to which alarms are posted as JSON: https, or http to loopback."
    )


class MemoryGuardOptions(Section):
    """The limit on OCR while memory is short."""

    area = OccupancyOptions.area

    enabled: bool = common(
        "Start no more OCR while this machine is short of memory. For machines whose GPU shares "
        "the machine's memory."
    )
    min_available_mib: Mebibytes = common(
        "MiB of available memory below which the machine is short of memory.",
        was="memory_guard.least_available_mib",
    )


class EmbeddedOptions(Section):
    """Values for the embedded CPU OCR server."""

    area = CpuOcrOptions.area

    worker_concurrency: Forks = expert(
        "Value of ocr.worker_concurrency with the embedded CPU OCR server."
    )
    pages_in_flight: Count = expert(
        "Value of ocr.pages_in_flight with the embedded CPU OCR server."
    )


class Settings(Section):
    """The whole tree. Build it with loader.load_settings() or get_settings()."""

    area = "General"

    data_dir: Folder = common("Folder for documents and the data of the embedded servers.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = common("Log level.")
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
        """The URL of the OCR server or the RunPod endpoint, or None if it is not set."""
        if self.ocr.transport == "direct":
            return self.ocr.base_url
        if self.runpod.endpoint_id is None:
            return None
        return f"{self.runpod.api_base}/{self.runpod.endpoint_id}"

    @property
    def unset_for_pages(self) -> str | None:
        """A sentence that names what ocr.transport needs and is not set, or None."""
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
        """Whether `run` and `up` start the CPU OCR server because no server is set."""
        return self.ocr.transport == "direct" and self.ocr.base_url is None

    @property
    def uses_layout(self) -> bool:
        """Whether the workers themselves may read pages block by block."""
        return self.ocr.transport == "direct" and self.ocr.layout is not LayoutMode.PAGE

    @property
    def needs_layout_server(self) -> bool:
        """Whether an ocr worker starts a layout server because no server is set."""
        return self.uses_layout and self.layout.url is None
