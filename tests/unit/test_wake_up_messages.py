"""The doorbell is rung from many threads of the API at once, right after its start too."""

import os
import subprocess
import sys

import pytest

RINGING = """
import sys, threading
from rag_service.jobs import wake_ups
from rag_service.states import Stage

def ring():
    together.wait()
    wake_ups.notify(Stage.PREPARE, "a-run", "a-file.pdf")
    rung.append(1)

sys.setswitchinterval(1e-6)
together, rung = threading.Barrier(8), []
threads = [threading.Thread(target=ring) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(rung))
"""


@pytest.mark.parametrize("attempt", range(4))
def test_the_first_doorbells_may_ring_at_the_same_moment(attempt):
    """In a process of its own: what is imported at first ringing is imported once."""
    done = subprocess.run(
        [sys.executable, "-c", RINGING],
        env=os.environ | {"REDIS_URL": "redis://127.0.0.1:1/0"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "8\n"
    assert "Traceback" not in done.stderr
