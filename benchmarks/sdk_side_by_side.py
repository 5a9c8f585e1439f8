"""Our regions beside the real glmocr SDK's: same stub server, same boxes, what each makes of them.

    python -m benchmarks.sdk_side_by_side --sdk-python PATH

First the pages of each case: the prompts and pictures that the two send, and their Markdown; text,
table, formula and titles must be the same. Then faults in which the SDK reports success, with what
we report beside it. Prints tables and writes benchmarks/results/sdk_side_by_side.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops, ImageStat

from benchmarks.peers import sample_pages, sdk
from benchmarks.peers.sample_pages import Block
from benchmarks.peers.scripted import Answer, Asked, ScriptedServer
from benchmarks.stack import RESULTS
from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.errors import LayoutUnavailable, RagServiceError
from rag_service.layout.page_layout import LayoutBox, PageLayout
from rag_service.parsers.contract import PageResult, PageTask, ParseJob
from rag_service.parsers.glmocr import GlmOcr
from rag_service.pdf.session import PdfSession
from rag_service.states import LayoutMode, PageState

# The SDK's own.
DPI = 200
# Crops differ by rounding where their sides do by no more than this.
STEP = 28
MOST_GREY_LEVELS = 2.0
# Of a picture that a server with a small cache takes.
MOST_WIDTH = 1200
TABLE = "<table><tr><td>Item</td><td>Price</td></tr><tr><td>Bolt</td><td>0.20</td></tr></table>"


@dataclass(frozen=True)
class Case:
    """A page: label and the model's answer of each block; their size in thousandths of the page."""

    name: str
    blocks: Sequence[tuple[str, str]]
    width: int = 830
    height: int = 60


# The first ones must come out the same.
CASES = (
    Case("text", [("text", "One line.\nThe second.\n\nA paragraph."), ("abstract", "In short.")]),
    Case("table", [("table", TABLE), ("figure_title", "Table 1. Prices")], height=200),
    Case("formula", [("display_formula", "$$E = mc^2$$"), ("display_formula", r"\[a + b\]"),
                     ("inline_formula", "x_i")], width=301),
    Case("titles", [("doc_title", "Annual report"), ("paragraph_title", "# Findings"),
                    ("paragraph_title", "- Costs")], height=21),
    Case("page", [("header", "Secret"), ("doc_title", "# Report"), ("text", "Some text."),
                  ("table", TABLE), ("display_formula", "a^2"), ("footnote", "1 Small."),
                  ("number", "7")], height=97),
    Case("numbered formula", [("display_formula", "E = mc^2"), ("formula_number", "(1)")],
         width=59, height=17),
    Case("list", [("text", "• One"), ("text", "1.Two"), ("text", "(a)Three")]),
    Case("split word", [("text", "A sen-"), ("text", "tence goes on.")]),
    Case("inline maths", [("text", "where $ x $is small")]),
    Case("dots", [("content", "Chapter 1 .......... 5")]),
    Case("code", [("algorithm", "```python\nprint(1)")]),
    Case("other labels", [("seal", "APPROVED"), ("vertical_text", "Spine"),
                          ("reference_content", "[1] A.")], width=120, height=200),
    Case("picture", [("image", ""), ("figure_title", "Figure 1.")]),
)  # fmt: skip
MUST_MATCH = 5


@dataclass(frozen=True)
class Compared:
    """One case: how many regions were sent, how they differ, and both texts."""

    case: str
    regions: int
    same_prompts: bool
    largest_side_difference: int
    grey_levels: float
    same_markdown: bool
    sdk: str
    ours: str


@dataclass(frozen=True)
class Fault:
    """What goes wrong: in an answer (None: the block's own), in the layout, or in the file."""

    name: str
    answer: Callable[[Asked], Answer | None] = lambda _: None
    layout_fails: bool = False
    damage: Callable[[Path, Path], None] | None = None


@dataclass(frozen=True)
class Reported:
    """What the two say of a fault."""

    fault: str
    sdk: str
    ours: str


def _always(text: str = "", **other: Any) -> Callable[[Asked], Answer]:
    return lambda _: Answer(text, **other)


def _too_large(asked: Asked) -> Answer | None:
    if asked.picture.width < MOST_WIDTH:
        return None
    return Answer(status=400, body=b'{"error": {"message": "exceeds the encoder cache size"}}')


def _no_document(_: Path, target: Path) -> None:
    target.write_bytes(b"%PDF-1.7\nnothing follows\n")


FAULTS = (
    Fault("none"),
    Fault("HTTP 400 to every request", _always(status=400, body=b'{"error": "no"}')),
    Fault("HTTP 400 to large pictures", _too_large),
    Fault("HTTP 500 to every request", _always(status=500, body=b'{"error": "no"}')),
    Fault("HTTP 200 without an answer", _always(body=b'{"choices": []}')),
    Fault("every answer empty", _always()),
    Fault("every answer cut (length)", _always("The text stops in", finish_reason="length")),
    Fault("every answer a loop", _always("Again and again.\n" * 300, finish_reason="length")),
    Fault("every answer the prompt", _always("Text Recognition:")),
    Fault("the layout model crashes", layout_fails=True),
    Fault("page 2 cannot be drawn", damage=lambda a, b: sample_pages.break_page(a, b, 2)),
    Fault("the file is no PDF", damage=_no_document),
)
_PENDING = PageResult(0, PageState.PENDING)


class GivenLayout:
    """Stands in for the layout server's client."""

    def __init__(self, boxes: Sequence[LayoutBox], *, fails: bool) -> None:
        self._boxes = tuple(boxes)
        self._fails = fails

    async def find(self, jpeg: bytes) -> PageLayout:  # noqa: ARG002
        """The same boxes for every page. Raises LayoutUnavailable if it is to fail."""
        if self._fails:
            raise LayoutUnavailable("The layout model crashed.")
        return PageLayout(self._boxes, "given")


class Kept:
    """Keeps pages as they end."""

    def __init__(self) -> None:
        self.results: dict[int, PageResult] = {}

    async def begin_page(self, number: int) -> None:
        """Nothing: no other client uses it."""

    async def require_lease(self) -> None:
        """Always."""

    async def store(self, result: PageResult) -> None:
        """The latest outcome of a page counts."""
        self.results[result.number] = result


class Alone:
    """No other worker knows more of the server."""

    def __init__(self) -> None:
        self._last: datetime | None = None

    async def is_up(self) -> bool:
        """Until the opposite is known."""
        return True

    async def last_answer(self) -> datetime | None:
        """When a page was answered."""
        return self._last

    async def answered(self) -> None:
        """A page was answered now."""
        self._last = datetime.now(UTC)


async def read(
    settings: Settings, file: Path, layout: GivenLayout
) -> tuple[int, dict[int, PageResult]]:
    """How many pages the file has, and each page's outcome, its later try included."""

    async def no_wait(_: float) -> None:
        return None

    parser = GlmOcr(settings, sleep=no_wait, open_layout=lambda _: nullcontext(layout))
    sink = Kept()
    async with PdfSession(settings.pdf, settings.limits.max_pages) as source:
        pages = (await source.open(file, "application/pdf")).pages
        for tries in (0, 1):
            due = [
                PageTask(number, tries)
                for number in range(1, pages + 1)
                if sink.results.get(number, _PENDING).state is PageState.PENDING
            ]
            job = ParseJob("run", settings.ocr.model, DPI, LayoutMode.REGIONS, due)
            await parser.parse(job, source, sink, Alone())
    return pages, sink.results


def our_settings(server: ScriptedServer) -> Settings:
    base = get_settings()
    return base.model_copy(update={"ocr": base.ocr.model_copy(update={"base_url": server.url})})


def answers(blocks: Sequence[Block]) -> Callable[[Asked], Answer]:
    """Each block's own answer."""
    by_number = {block.number: block.answer for block in blocks}

    def answer(asked: Asked) -> Answer:
        number = sample_pages.number_in(asked.picture)
        return Answer("A whole page.") if number is None else Answer(by_number[number])

    return answer


def drawn_cases(folder: Path) -> list[tuple[str, Path, list[Block]]]:
    """Name, file and blocks of each case; no two blocks have the same number."""
    drawn, first = [], 1
    for case in CASES:
        blocks = sample_pages.stacked(first, case.blocks, case.width, case.height)
        first += len(blocks)
        file = folder / f"{case.name.replace(' ', '-')}.pdf"
        sample_pages.write(file, [blocks])
        drawn.append((case.name, file, blocks))
    return drawn


def compare_cases(python: Path, server: ScriptedServer, folder: Path) -> list[Compared]:
    """Every case by both."""
    drawn = drawn_cases(folder)
    server.script = answers([block for _, _, blocks in drawn for block in blocks])
    pages = [[block.box for block in blocks] for _, _, blocks in drawn]
    answer = sdk.run(python, sdk.SdkJob(server.port, [file for _, file, _ in drawn], pages))
    if answer.error:
        raise AssertionError(answer.error)
    asked = _by_number(server.take())
    return [
        compare_case(server, name, file, blocks, asked, result.markdown)
        for (name, file, blocks), result in zip(drawn, answer.results, strict=True)
    ]


def compare_case(
    server: ScriptedServer,
    name: str,
    file: Path,
    blocks: Sequence[Block],
    all_theirs: dict[int, Asked],
    theirs_markdown: str,
) -> Compared:
    layout = GivenLayout([block.box for block in blocks], fails=False)
    _, results = asyncio.run(read(our_settings(server), file, layout))
    own = _by_number(server.take())
    theirs = {block.number: all_theirs[block.number] for block in blocks
              if block.number in all_theirs}  # fmt: skip
    pairs = [(theirs[number], own[number]) for number in sorted(theirs.keys() & own.keys())]
    markdown = results[1].markdown
    return Compared(
        case=name,
        regions=len(pairs),
        same_prompts=theirs.keys() == own.keys() and all(a.prompt == b.prompt for a, b in pairs),
        largest_side_difference=max(side_difference(a.picture, b.picture) for a, b in pairs),
        grey_levels=round(max(grey_difference(a.picture, b.picture) for a, b in pairs), 2),
        same_markdown=markdown == theirs_markdown,
        sdk=theirs_markdown,
        ours=markdown,
    )


def _by_number(asked: Sequence[Asked]) -> dict[int, Asked]:
    numbered = ((sample_pages.number_in(one.picture), one) for one in asked)
    return {number: one for number, one in numbered if number is not None}


def side_difference(one: Image.Image, other: Image.Image) -> int:
    """Pixels by which the sides of two pictures differ at most."""
    return max(abs(one.width - other.width), abs(one.height - other.height))


def grey_difference(one: Image.Image, other: Image.Image) -> float:
    """Mean difference of two pictures of the same thing, in levels of 255."""
    grey = one.convert("L")
    same_size = other.convert("L").resize(grey.size, Image.Resampling.BICUBIC)
    return float(ImageStat.Stat(ImageChops.difference(grey, same_size)).mean[0])


def report_fault(python: Path, server: ScriptedServer, fault: Fault, folder: Path) -> Reported:
    """Three pages of two blocks, read by both while this goes wrong."""
    contents = [("doc_title", "Page {}"), ("text", "What page {} says.")]
    pages = [
        sample_pages.stacked(
            number * 10, [(label, text.format(number)) for label, text in contents], height=120
        )
        for number in (1, 2, 3)
    ]
    file = folder / "fault.pdf"
    sample_pages.write(file, pages)
    if fault.damage is not None:
        fault.damage(file, folder / "damaged.pdf")
        file = folder / "damaged.pdf"
    own = answers([block for blocks in pages for block in blocks])
    server.script = lambda asked: fault.answer(asked) or own(asked)
    boxes = [block.box for block in pages[0]]
    theirs = sdk.run(python, sdk.SdkJob(server.port, [file], [boxes], fault.layout_fails))
    own = _ours_in_words(server, file, GivenLayout(boxes, fails=fault.layout_fails))
    return Reported(fault.name, _theirs_in_words(theirs), own)


def _theirs_in_words(answer: sdk.SdkAnswer) -> str:
    if answer.error:
        return answer.error
    (result,) = answer.results
    read = "; ".join(
        f"{number}: {_shortened(' '.join(str(region['content']) for region in regions))}"
        for number, regions in enumerate(result.pages, start=1)
    )
    return f"success, {len(result.pages)} pages. {read}"


def _ours_in_words(server: ScriptedServer, file: Path, layout: GivenLayout) -> str:
    try:
        _, results = asyncio.run(read(our_settings(server), file, layout))
    except RagServiceError as error:
        return f"document failed: {error.code}"
    return "; ".join(f"{number}: {_in_words(result)}" for number, result in sorted(results.items()))


def _in_words(result: PageResult) -> str:
    if result.error is not None:
        return f"failed, {result.error.code}"
    codes = {warning.code for warning in result.warnings}
    return " ".join([result.state, *sorted(codes), _shortened(result.markdown)])


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 40 else f"{line[:37]}...")


def show(cases: Sequence[Compared], faults: Sequence[Reported]) -> None:
    print(f"\n{'case':18} {'regions':>7} {'prompts':>8} {'sides':>6} {'levels':>7} {'Markdown':>9}")
    for case in cases:
        print(
            f"{case.case:18} {case.regions:7} {_same(case.same_prompts):>8}"
            f" {case.largest_side_difference:6} {case.grey_levels:7.2f}"
            f" {_same(case.same_markdown):>9}"
        )
    for case in cases:
        if not case.same_markdown:
            print(f"\n{case.case}\n  SDK:  {case.sdk!r}\n  ours: {case.ours!r}")
    for fault in faults:
        print(f"\n{fault.fault}\n  SDK:  {fault.sdk}\n  ours: {fault.ours}")


def _same(same: bool) -> str:
    return "same" if same else "differ"


def verdict(cases: Sequence[Compared]) -> str:
    """Whether the two sent and made the same where they must."""
    pictures = all(
        case.largest_side_difference <= STEP and case.grey_levels <= MOST_GREY_LEVELS
        for case in cases
    )
    wanted = {
        "same prompts": all(case.same_prompts for case in cases),
        "crops within rounding": pictures,
        f"same Markdown of {', '.join(case.case for case in cases[:MUST_MATCH])}": all(
            case.same_markdown for case in cases[:MUST_MATCH]
        ),
    }
    return "\n".join(f"{what}: {'met' if met else 'missed'}" for what, met in wanted.items())


def compare(python: Path) -> None:
    with tempfile.TemporaryDirectory() as name, ScriptedServer() as server:
        cases = compare_cases(python, server, Path(name))
        faults = [report_fault(python, server, fault, Path(name)) for fault in FAULTS]
    show(cases, faults)
    print(f"\n{verdict(cases)}")
    summary: dict[str, Any] = {
        "sdk": sdk.VERSION,
        "cases": [asdict(case) for case in cases],
        "faults": [asdict(fault) for fault in faults],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=1, ensure_ascii=False)
    (RESULTS / "sdk_side_by_side.json").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sdk.add_argument(parser)
    python = parser.parse_args().sdk_python
    if python is None:
        print(f"The SDK is absent: {sdk.INSTALL}, then --sdk-python sdk/bin/python")
    else:
        compare(python)


if __name__ == "__main__":
    main()
