"""Loaded at a program's start through PYTHONPATH: its wall clock is SKEW_SECONDS wrong."""

import datetime
import os
import time

_SKEW = float(os.environ["SKEW_SECONDS"])
_time = time.time


class _Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=_SKEW)


time.time = lambda: _time() + _SKEW
datetime.datetime = _Skewed  # type: ignore[misc]
