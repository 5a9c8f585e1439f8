"""Processes whose machine's clock is minutes wrong see the same as all others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rag_service.jobs import live_workers
from tests import simulation as sim

FAKE = Path(__file__).parents[1] / "fakes" / "skewed_clock"
FAULTS = """
from rag_service.config.loader import get_settings
from rag_service.monitoring import readiness
print(*(fault.name for fault in readiness.processing_faults(get_settings())))
"""


def run(skew, *arguments):
    path = os.pathsep.join([str(FAKE), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "SKEW_SECONDS": str(skew)}
    argv = [sys.executable, *arguments]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("skew", [-600, 600])
def test_maintenance_is_judged_by_the_databases_clock(settings, skew):
    live_workers.claim_maintenance("m", 30)
    assert "maintenance" not in run(skew, "-c", FAULTS).stdout.split()
    assert run(skew, "-m", "workers.health_check", "maintenance").returncode == 0
    sim.execute("UPDATE maintenance_lease SET seen_at = clock_timestamp() - interval '2 minutes'")
    assert "maintenance" in run(skew, "-c", FAULTS).stdout.split()
    silent = run(skew, "-m", "workers.health_check", "maintenance")
    assert (silent.returncode, "last seen" in silent.stderr) == (1, True)
