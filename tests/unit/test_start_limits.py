"""A process with too low limits does not start; the sentence says what to raise."""

import resource
import subprocess
import sys

import pytest

from rag_service.errors import ConfigurationError
from rag_service.runtime import start_limits


def test_few_open_files_stop_the_start_of_a_real_process():
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", sys.executable, "-m", "rag_service.cli.main",
         "worker", "maintenance"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "it may open 64 files at once, and at least 256 are needed" in done.stderr
    assert "ulimit -n 4096" in done.stderr


def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: (64, 2048)}
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda name: limits.get(name) or real(name))
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    start_limits.require_start_limits()
    assert limits[resource.RLIMIT_NOFILE] == (2048, 2048)


def shortages(monkeypatch, tmp_path):
    files = tmp_path / "max", tmp_path / "current"
    files[0].write_text("100\n")
    files[1].write_text("90\n")
    usage = type("Usage", (), {"free": 1 << 20})
    real = resource.getrlimit
    space = {resource.RLIMIT_AS: (1 << 30, resource.RLIM_INFINITY)}
    return {
        "10 processes and threads more": (start_limits, "_PIDS", files),
        "100 MiB of memory": (start_limits, "available_mib", lambda: 100),
        "1 MiB free for temporary files": (start_limits.shutil, "disk_usage", lambda _: usage),
        "limited to 1024 MiB": (resource, "getrlimit", lambda name: space.get(name) or real(name)),
        "no free threads": (start_limits, "find_shortage", lambda: "no free threads"),
    }


@pytest.mark.parametrize("number", range(5))
def test_each_low_limit_is_a_sentence(monkeypatch, tmp_path, number):
    words, change = list(shortages(monkeypatch, tmp_path).items())[number]
    start_limits.require_start_limits()
    monkeypatch.setattr(*change)
    with pytest.raises(ConfigurationError, match=words):
        start_limits.require_start_limits()
