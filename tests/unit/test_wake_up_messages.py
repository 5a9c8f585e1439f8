"""Wake-up messages are sent by many threads of the API, also right after its start."""

import os
import subprocess
import sys

import pytest

SEND = """
import sys, threading
from rag_service.jobs import wake_ups
from rag_service.states import Stage

def send():
    barrier.wait()
    wake_ups.notify(Stage.PREPARE, "a-run", "a-file.pdf")
    sent.append(1)

sys.setswitchinterval(1e-6)
barrier, sent = threading.Barrier(8), []
threads = [threading.Thread(target=send) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(sent))
"""


@pytest.mark.parametrize("attempt", range(4))
def test_the_first_messages_may_be_sent_concurrently(attempt):
    """In a new process: the first message imports Celery, which must happen once."""
    done = subprocess.run(
        [sys.executable, "-c", SEND],
        env=os.environ | {"REDIS_URL": "redis://127.0.0.1:1/0"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "8\n"
    assert "Traceback" not in done.stderr
