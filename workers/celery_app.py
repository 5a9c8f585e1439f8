"""The Celery application of the workers: queues, routes, limits.

Start it with `rag-service worker …` or `celery -A workers.celery_app worker`.
No heavy imports here: forks are made from this process.
"""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES

from rag_service.config.loader import get_settings
from rag_service.jobs.wake_ups import TASK_NAMES, make_app
from rag_service.states import Stage
from workers.servers.layout.celery_step import LayoutStep

settings = get_settings()
# Not by the setting broker_transport, which would appear in the broker's URL in logs.
TRANSPORT_ALIASES |= dict.fromkeys(
    ("redis", "rediss"), "workers.celery_transport:TolerantTransport"
)
app = make_app(settings)
app.conf.update(
    imports=("workers.prepare_worker", "workers.ocr_worker", "workers.main_process"),
    task_routes={TASK_NAMES[stage]: {"queue": stage.value} for stage in Stage},
    # Explicit: `celery worker` would use the number of CPU cores.
    worker_concurrency=settings.ocr.worker_concurrency,
    worker_pool="workers.celery_pool:TaskPool",
    worker_prefetch_multiplier=1,
    task_acks_late=True,
    # The main process releases the run of a lost child; its message must not be redelivered.
    task_reject_on_worker_lost=False,
    # The epoch fences what a lost child may still have sent: no need to wait 10 s for it.
    worker_lost_wait=0.1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # A broker that answers with an error (READONLY, OOM, MISCONF) is waited for, too.
    broker_channel_error_retry=True,
    worker_consumer="workers.celery_transport:PatientConsumer",
    worker_send_task_events=True,
    task_send_sent_event=True,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
)
app.steps["worker"].add(LayoutStep)
