"""The constants of the search for the number in flight, with units and sources.

Sources, as named in the comments:
- occupancy: chosen by trying values in `python -m benchmarks.occupancy` and in the tests'
  simulated servers. The value is one that works on all of them, not a measured optimum.
- H200: seen in front of vLLM on a real H200 (benchmarks/results/real_server_*.json).
- reason: follows from how the search works; no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StrategyTuning:
    """Constants that differ between a server with gauges and one without."""

    # Factor on the limit in a trial of more, and of less. occupancy: a step must exceed the noise
    # of its signal, and the answers' times of one process are noisier than the server's tokens.
    more: float
    less: float
    # Relative difference of throughput below which two windows count as equal. occupancy.
    noise: float
    # Shortest window, in times of an answer. reason: a window holds answers that were sent in it.
    answers_per_window: float
    # Answers in a window from which their times are used. reason: without gauges there is no
    # other signal, so one must do.
    fewest_answers: int
    # Times of an answer until the server shows a doubling. H200: answers come in lumps, because
    # requests that went out together come back together.
    answers_to_feel: float


@dataclass(frozen=True, slots=True)
class SearchTuning:
    """Every constant of the search. Times are seconds, limits are requests."""

    gauged: StrategyTuning = field(
        default_factory=lambda: StrategyTuning(
            more=1.25,
            less=0.88,
            noise=0.012,
            answers_per_window=2.0,
            fewest_answers=2,
            answers_to_feel=1.0,
        )
    )
    blind: StrategyTuning = field(
        default_factory=lambda: StrategyTuning(
            more=1.4,
            less=0.75,
            noise=0.06,
            answers_per_window=3.0,
            fewest_answers=1,
            answers_to_feel=2.0,
        )
    )

    # Limits that a process may have. reason: 0.1 lets ten processes share a server that reads one
    # page at a time; more than 1024 is no server's batch.
    least: float = 0.1
    most: float = 1024.0
    # Requests that all processes together begin with on an unknown server. occupancy (serial):
    # eight do no harm to a server that reads one page at a time.
    begin_together: float = 8.0

    # --- Windows (windows.py)
    # Shortest window. reason: eight samples, one a second.
    shortest_window: float = 8.0
    # Factor between window lengths. reason: processes whose answers take about equally long must
    # get the same length, so there are few lengths.
    window_growth: float = 1.5
    # Share of a window that is still worth a window of its own; less joins the next one. reason.
    worth_a_window: float = 0.6
    # First share of a window that is not measured: it still shows the limit before. occupancy.
    settling: float = 0.4
    # Windows in a cycle, and the places in it of the trial of less and of more. reason: a window
    # at the usual limit stands between two trials.
    windows_per_cycle: int = 4
    less_at: int = 0
    more_at: int = 2
    # Windows for which a trial is remembered. occupancy: long enough for ten trials each way.
    kept_windows: int = 40

    # --- Measurement (window_samples.py)
    # Share of the limit that must have been in use for a window to count. occupancy.
    used_share: float = 0.7
    # Factor on that for a limit below 1, which is itself a share of the time. reason.
    used_share_below_one: float = 0.5
    # Weight of a new answer in the running mean of answer times. occupancy.
    answer_weight: float = 0.15
    # Growth of the remembered shortest mean for each window, so that a server that became slower
    # is not taken for queued forever. reason.
    shortest_mean_growth: float = 1.01
    # Answers and samples that are kept. reason: more than any window holds.
    kept_answers: int = 500
    kept_samples: int = 4096

    # --- Trials (trials.py)
    # Relative difference below which two limits are one, and its newest windows that count.
    # occupancy.
    same_limit: float = 0.02
    newest_of_limit: int = 12
    # Factor within which limits are averaged when the best throughput is looked for. occupancy:
    # the luckiest single window must not decide.
    similar_limits: float = 1.2
    # Windows that make a mean, and changes that show how much a signal varies. reason.
    enough_windows: int = 2
    enough_changes: int = 3
    # Load of the server, relative to the window before, below which other clients have left it.
    # H200: others that had run out of pages looked like a step that brought nothing.
    others_left: float = 0.75
    # Requests that may wait in the server: at least this many, or this share of the running ones.
    # occupancy: enough that no slot idles between two answers.
    waiting_least: float = 3.0
    waiting_share: float = 0.08

    # --- Doubling (doubling.py)
    # Times of an answer, after the doubling was felt, until its throughput is known. H200: a part
    # of a lump showed twice the throughput.
    answers_to_show: float = 1.2
    # Share of the doubling's wait after which it is judged. reason: samples come once a second.
    almost: float = 0.9
    # Share of a step that must come back as throughput; with few answers from a server without
    # gauges; and the share that shows a server with little to do. occupancy.
    worth: float = 0.18
    worth_few_answers: float = 0.35
    plenty: float = 0.6
    # Answers that are enough to trust their times. occupancy.
    trusted_answers: int = 6
    # Answer time, relative to the shortest mean, from which answers wait in a queue. occupancy.
    queued_answer: float = 2.2
    # The same from which no further doubling is made. occupancy.
    late_answer: float = 2.9
    # Factor on the limit before the last doubling, at which the doubling phase ends. occupancy.
    after_doubling: float = 1.2
    # An early doubling needs this many requests running and fewer than this many waiting. reason:
    # two at a time show that the server batches. Without it a cold start of the report's server
    # took 41 s to eight in flight (occupancy).
    batching_running: float = 2.0
    batching_waiting: float = 1.0

    # --- Steady phase (steady.py)
    # Share of samples with nothing running from which the server counts as idle. occupancy.
    idle_share: float = 0.03
    # Factors on the limit when the server idles, and when others limits did better. occupancy.
    more_if_idle: float = 1.3
    more_if_below_best: float = 1.12
    # Growth that must be safe before any is made. reason: the smaller of the usual steps.
    usual_growth: float = 1.15
    # Noises by which a limit must be below the best, and above the usual one. occupancy.
    noises_below_best: float = 2.0
    noises_above_usual: float = 1.5
    # Largest noise that is assumed. reason: beyond it nothing would ever be a difference.
    most_noise: float = 0.1
    # Part of the throughput given up for short answers that a step up must also bring. occupancy.
    yielded_part: float = 0.25
    # Share of the allowed loss below which one look is enough to keep less. occupancy.
    clear_loss: float = 0.33
    # Waiting requests below which a limit below 1 is not lowered: the server would idle.
    # occupancy (serial).
    lean_waiting: float = 2.5

    # --- Cuts (cuts.py)
    # Share of the client's time-out that no answer may exceed. reason: a doubling of the answer
    # time still leaves a margin.
    safe_share: float = 0.4
    # Longest answer, in seconds, of a server without gauges if more than one request of this
    # process waits in it: it may read one page after the other. occupancy (serial): with the
    # shipped time-out of half an hour nothing else bounds its queue.
    blind_seconds: float = 120.0
    # Samples whose mean shows a queue. reason: one sample may fall between two answers.
    waiting_samples: int = 5
    # Multiple of the allowed waiting requests from which the limit is cut. occupancy.
    waiting_factor: float = 2.0
    # Factors on the limit after a time-out, after an answer that came near it, and the largest cut
    # for a queue. reason: halving is the usual answer to loss; a late answer is a milder sign.
    cut_timed_out: float = 0.5
    cut_late: float = 0.7
    cut_queue: float = 0.5
    # Seconds without a further cut after a time-out; times of an answer after a late one; least
    # seconds, and times of an answer, after a queue. reason: the effect of a cut must show first.
    pause_timed_out: float = 10.0
    pause_late: float = 0.6
    pause_queue: float = 6.0
    drained_after: float = 1.2

    # --- Parts of the processes (fair_share.py)
    # Growth and fall of the number of processes that change no part. reason: at eight processes
    # one that comes or goes must not restart the search of all.
    few_gone: float = 0.76
    few_come: float = 1.32
    # Part of the difference to the mean that goes in one window, and the relative difference that
    # stays. occupancy.
    evening: float = 0.3
    even_enough: float = 0.1


TUNING = SearchTuning()
