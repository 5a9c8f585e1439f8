"""The command `probe`: measures how many requests in flight suit an OCR server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli.common_options import Json, begin
from rag_service.cli.output import note, print_json, print_table, stderr
from rag_service.errors import (
    ConfigurationError,
    OcrMisconfigured,
    RagServiceError,
    ServiceUnreachable,
)

if TYPE_CHECKING:
    from rag_service.config.options import OcrOptions, Settings
    from rag_service.ocr.ocr_client import OcrClient, Probe
    from rag_service.ocr.probe.findings import Bounds, Ending, Step
    from rag_service.ocr.probe.measurement import ProbeQuestion

_INTERRUPTED = 130
_COLUMNS = (
    "in flight", "pages/s", "median s", "p95 s", "running", "waiting", "cache", "tokens/page",
    "answers",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(probe)


@dataclass
class _Results:
    """The results so far; they are printed also if the probe is interrupted or fails."""

    steps: list[Step]
    slots: int | None = None
    ending: Ending | None = None
    error: Exception | None = None


def probe(
    url: Annotated[str, typer.Argument(help="The OCR server's URL, http://host:port.")],
    model: Annotated[
        str | None, typer.Option(help="The model to use instead of GLMOCR_MODEL.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="The least duration of a step, in seconds.")
    ] = 10.0,
    answers: Annotated[int, typer.Option(min=1, help="The least number of answers in a step.")] = 6,
    max_latency: Annotated[
        float, typer.Option(min=0.1, help="An answer that takes more seconds is too slow.")
    ] = 120.0,
    most: Annotated[int, typer.Option(min=1, help="The most requests in flight.")] = 256,
    dpi: Annotated[
        int | None,
        typer.Option(min=50, max=600, help="The resolution of the pages. Default: ocr.dpi."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the steps as a plot in this SVG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how many requests in flight suit an OCR server, by sending it sample pages."""
    settings = begin()
    from rag_service.ocr.probe.findings import Bounds

    if plot is not None and not plot.parent.is_dir():
        raise ConfigurationError(f"--plot: there is no folder {plot.parent}.")
    server = _server(settings, url, model)
    bounds = Bounds(seconds, answers, max_latency, server.read_timeout, most)
    results = _Results([])
    _run(server, bounds, dpi or server.dpi, results, print_json if as_json else _print_nothing)
    _report(settings, server, results, plot, as_json=as_json)


def _server(settings: Settings, url: str, model: str | None) -> OcrOptions:
    """Return the OCR settings with this server's URL and model. Raises ConfigurationError."""
    from pydantic import ValidationError

    from rag_service.config.explanations import message_of

    known = dict(settings.ocr)
    changed = {"base_url": url, "model": model or settings.ocr.model}
    try:
        return type(settings.ocr).model_validate(known | changed)
    except ValidationError as error:
        without_password = url.rpartition("@")[2]
        raise ConfigurationError(f"{without_password}: {message_of(error.errors()[0])}") from None


def _print_nothing(_step: Step) -> None:
    """Print no step yet: the table is printed at the end."""


def _run(
    server: OcrOptions,
    bounds: Bounds,
    dpi: int,
    results: _Results,
    print_step: Callable[[Step], None],
) -> None:
    with stderr().status("Drawing pages …") as status:

        def starting(in_flight: int) -> None:
            status.update(f"{in_flight} in flight …")

        def ended(step: Step) -> None:
            results.steps.append(step)
            print_step(step)

        asyncio.run(_measure(server, bounds, dpi, results, starting, ended))


async def _measure(
    server: OcrOptions,
    bounds: Bounds,
    dpi: int,
    results: _Results,
    starting: Callable[[int], None],
    ended: Callable[[Step], None],
) -> None:
    from rag_service.ocr.ocr_client import OcrClient
    from rag_service.ocr.probe.measurement import ProbeLoad, probe

    with _interruptible() as stop:
        async with OcrClient(server, connections=bounds.most) as client:
            await _require_answer(client)
            results.slots = (await client.limits()).slots
            question = await _question(client, server, dpi)
            async with ProbeLoad(client, question, bounds) as load:
                results.ending = await probe(
                    load, bounds, results.slots, stop, starting=starting, ended=ended
                )
            results.error = load.error


@contextmanager
def _interruptible() -> Iterator[asyncio.Event]:
    """Yield an event that the first signal sets; a second signal ends the command at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _require_answer(client: OcrClient) -> None:
    """Raise ServiceUnreachable, or ConfigurationError if it is not a usable OCR server."""
    answer = await client.probe()
    if answer.ok:
        return
    if answer.misconfigured:
        raise ConfigurationError(_refusal(answer))
    raise ServiceUnreachable(answer.message)


def _refusal(answer: Probe) -> str:
    """Return the client's message with advice that fits a URL given as an argument."""
    if answer.other_model:
        return f"{answer.message}; name one with --model."
    return (
        f"{answer.answer or answer.message}; check the URL, or the key "
        "(GLMOCR_API_KEY): it must be an OpenAI-compatible server that serves a model."
    )


async def _question(client: OcrClient, server: OcrOptions, dpi: int) -> ProbeQuestion:
    from rag_service.layout.page_layout import Task
    from rag_service.ocr.probe.measurement import ProbeQuestion
    from rag_service.ocr.probe.sample_pages import SamplePages
    from rag_service.ocr.token_budget import answer_budget
    from rag_service.parsers.block_markdown import PROMPTS

    pages = await asyncio.to_thread(SamplePages, dpi)
    info = await client.model_info()
    budget = answer_budget(
        pages.width,
        pages.height,
        ceiling=server.max_tokens,
        max_model_len=info.max_model_len,
    )
    return ProbeQuestion(pages.draw, PROMPTS[Task.TEXT], budget)


def _report(
    settings: Settings, server: OcrOptions, results: _Results, plot: Path | None, *, as_json: bool
) -> None:
    """Print the findings. Raise the server's error if there are none."""
    from rag_service.diagnosis.probe_advice import advise
    from rag_service.ocr.probe.findings import Ending, conclude

    ending = results.ending or Ending.INTERRUPTED
    findings = conclude(results.steps, ending, results.slots)
    if findings is None and ending is not Ending.INTERRUPTED:
        raise _failure(server, results.error)
    if findings is not None:
        advice = advise(results.steps, findings, settings.ocr.worker_concurrency)
        if as_json:
            print_json(findings.model_dump(mode="json") | advice.model_dump(mode="json"))
        else:
            print_table(_COLUMNS, map(_row, results.steps))
            print("\n" + "\n".join(advice.lines(findings)))
        _draw(server, results.steps, plot)
    if ending is Ending.INTERRUPTED:
        note("Interrupted; the figures are those measured so far.")
        raise typer.Exit(_INTERRUPTED)


def _draw(server: OcrOptions, steps: list[Step], plot: Path | None) -> None:
    if plot is None:
        return
    from rag_service.cli.probe_plot import draw

    plot.write_text(draw(server.base_url or "", steps), encoding="utf-8")
    note(f"The plot is in {plot}.")


def _failure(server: OcrOptions, error: Exception | None) -> RagServiceError:
    from rag_service.ocr.ocr_client import AnswerTimedOut
    from rag_service.runtime.retry import TryAgain

    if isinstance(error, OcrMisconfigured):
        return ConfigurationError(error.message)
    if isinstance(error, TryAgain) and not isinstance(error, AnswerTimedOut):
        return ServiceUnreachable(str(error))
    if isinstance(error, RagServiceError):
        return error
    return RagServiceError(
        f"{server.base_url} answered no page in time, one at a time; raise --max-latency."
    )


def _row(step: Step) -> tuple[object, ...]:
    return (
        step.in_flight,
        _short(step.pages_per_second),
        _short(step.median),
        _short(step.p95),
        _short(step.running),
        _short(step.waiting),
        None if step.cache_use is None else f"{step.cache_use:.0%}",
        None if step.completion_tokens is None else round(step.completion_tokens),
        step.answers,
    )


def _short(value: float | None) -> str | None:
    """Return the number with three significant digits."""
    return None if value is None else f"{value:.3g}"
