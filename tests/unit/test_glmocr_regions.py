"""The parser `glmocr` by regions, and on the whole page with regions as the second try."""

import asyncio

import pytest

from rag_service.errors import LayoutUnavailable, OcrOutage, PageUnrenderable
from rag_service.layout.page_layout import LayoutBox
from rag_service.states import LayoutMode, PageState
from tests.fakes import ocr_server as fake
from tests.parsing import Reader, region_mark
from tests.waiting import eventually

TITLE = LayoutBox("doc_title", 0.9, (100, 50, 900, 90))
TEXT = LayoutBox("text", 0.9, (100, 150, 900, 390))
TABLE = LayoutBox("table", 0.9, (100, 450, 900, 590))
FORMULA = LayoutBox("display_formula", 0.9, (100, 650, 900, 690))
PHOTO = LayoutBox("image", 0.9, (100, 750, 900, 890))
FOOTER = LayoutBox("footer", 0.9, (100, 950, 900, 990))
CUT = fake.Reply(text="One. Two. Three, and", finish_reason="length")


@pytest.fixture(scope="module")
def running():
    with fake.FakeOcrServer() as server:
        yield server


@pytest.fixture
def server(running):
    running.reset()
    # It reads the known page, so a bad end is the page's own.
    running.known = fake.OK
    yield running
    assert running.doubled == []


@pytest.fixture
def regions(server):
    reader = Reader(server)
    reader.layout = LayoutMode.REGIONS
    return reader


@pytest.fixture
def auto(server):
    reader = Reader(server)
    reader.layout = LayoutMode.AUTO
    return reader


def answer(reader, box, *replies, page=1):
    reader.server.script(region_mark(reader.document, page, box.bbox), *replies)


def asked(reader, box, page=1):
    return reader.server.of(region_mark(reader.document, page, box.bbox))


def prompt(request):
    return request.body["messages"][0]["content"][1]["text"]


def codes(result):
    return [warning.code for warning in result.warnings]


def test_each_region_is_read_by_its_own_prompt_and_joined_in_order(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT, TABLE, FORMULA]
    answer(regions, TITLE, fake.Reply(text="Report"))
    answer(regions, TEXT, fake.Reply(text="Some words."))
    answer(regions, TABLE, fake.Reply(text="<table><tr><td>1</td></tr></table>"))
    answer(regions, FORMULA, fake.Reply(text="$$a+b$$"))
    result = regions.read()[1]
    assert result.state is PageState.OCR
    assert [region.label for region in result.regions] == [
        "doc_title", "text", "table", "display_formula",
    ]  # fmt: skip
    assert [region.index for region in result.regions] == [0, 1, 2, 3]
    assert [region.bbox for region in result.regions][2] == TABLE.bbox
    blocks = result.markdown.split("\n\n")
    assert blocks[:3] == ["# Report", "Some words.", "<table><tr><td>1</td></tr></table>"]
    assert "a+b" in blocks[3]
    assert [prompt(asked(regions, box)[0]) for box in (TITLE, TEXT, TABLE, FORMULA)] == [
        "Text Recognition:", "Text Recognition:", "Table Recognition:", "Formula Recognition:",
    ]  # fmt: skip


def test_the_pages_tokens_are_the_sum_of_its_regions(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    result = regions.read()[1]
    assert (result.prompt_tokens, result.finish_reason) == (200, "stop")
    assert result.seconds > 0
    assert result.dpi == 72


def test_pictures_are_kept_and_footers_dropped_without_a_request(regions):
    regions.layouts.boxes[1] = [TEXT, PHOTO, FOOTER]
    result = regions.read()[1]
    assert [region.label for region in result.regions] == ["text", "image"]
    assert "pages/1/image?bbox=100,750,900,890" in result.markdown
    assert len(regions.server.requests) == 1


def test_regions_of_all_pages_share_the_places_in_flight(regions):
    for page in range(1, 5):
        regions.layouts.boxes[page] = [TITLE, TEXT, TABLE, FORMULA]
    regions.server.default = fake.Reply(text="<table></table>words", delay=0.05)
    assert len(regions.read(4)) == 4
    assert len(regions.server.requests) == 16
    assert regions.server.peak == 3


@pytest.mark.parametrize("boxes", [[], [FOOTER], [PHOTO]])
def test_a_page_whose_layout_has_nothing_to_read_is_read_whole(regions, boxes):
    regions.layouts.boxes[1] = boxes
    result = regions.read()[1]
    assert (result.state, result.markdown) == (PageState.OCR, regions.mark().text)
    assert len(regions.requests()) == 1


def test_a_photo_is_a_page_without_text_after_two_readings(regions):
    regions.layouts.boxes[1] = [PHOTO]
    regions.server.default = fake.EMPTY
    result = regions.read()[1]
    assert (result.state, codes(result)) == (PageState.NO_TEXT, ["page_without_text"])
    assert len(regions.requests()) == 2


def test_if_all_regions_are_empty_the_whole_page_is_read(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    for box in (TITLE, TEXT):
        answer(regions, box, fake.EMPTY)
    result = regions.read()[1]
    assert (result.state, result.markdown) == (PageState.OCR, regions.mark().text)


def test_a_page_with_text_boxes_but_no_text_fails(regions):
    regions.layouts.boxes[1] = [TEXT]
    regions.server.default = fake.EMPTY
    result = regions.read()[1]
    assert (result.state, result.error.code) == (PageState.FAILED, "ocr_empty")


def test_one_empty_region_among_others_does_no_harm(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    answer(regions, TITLE, fake.EMPTY)
    result = regions.read()[1]
    assert result.state is PageState.OCR
    assert result.markdown == region_mark(regions.document, 1, TEXT.bbox).text


def test_a_cut_region_gets_a_higher_limit_once(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    answer(regions, TEXT, CUT)
    assert regions.read()[1].state is PageState.OCR
    first, second = asked(regions, TEXT)
    assert second.max_tokens > first.max_tokens


def test_a_region_cut_twice_truncates_the_page_and_is_named(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    answer(regions, TEXT, CUT, CUT)
    result = regions.read()[1]
    assert (result.state, result.finish_reason) == (PageState.TRUNCATED, "length")
    assert result.warnings[0].message.startswith("Region 2 (text)")
    assert "Three, and" in result.markdown


def test_a_region_that_loops_is_read_again_at_another_temperature(regions):
    regions.layouts.boxes[1] = [TEXT]
    answer(regions, TEXT, fake.LOOP)
    assert codes(regions.read()[1]) == []
    cold, warm = asked(regions, TEXT)
    assert cold.body["temperature"] < warm.body["temperature"]
    assert "top_k" not in warm.body


def test_a_loop_that_stays_is_cut_and_flagged(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    looping = fake.Reply(text="First words.\n" + "Again.\n" * 300, finish_reason="length")
    answer(regions, TEXT, looping, looping)
    result = regions.read()[1]
    assert (result.state, codes(result)) == (PageState.OCR, ["repetition_cut"])
    assert "First words." in result.markdown
    assert result.markdown.count("Again.") < 10


def test_a_refused_region_fails_the_page_by_name(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    answer(regions, TEXT, fake.refusal(400))
    result = regions.read()[1]
    assert (result.state, result.error.code) == (PageState.FAILED, "ocr_rejected")
    assert "Region 2 (text)" in result.error.message


def test_a_region_refused_for_its_size_is_sent_again_at_two_thirds(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    answer(regions, TEXT, fake.ENCODER_CACHE)
    assert regions.read()[1].state is PageState.OCR
    assert (1, 48, [TEXT.bbox]) in regions.source.cropped


def test_a_failing_region_gives_the_page_one_later_try_and_stops_its_other_requests(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    answer(regions, TITLE, fake.NEVER)
    answer(regions, TEXT, fake.refusal(500))
    assert regions.read()[1].retry_in is not None
    eventually(lambda: not regions.server.alive())
    assert asked(regions, TITLE)[0].outcome == "disconnected"


def test_an_outage_in_the_middle_of_a_page_parks_the_run(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT]
    regions.server.default = fake.gateway(503)
    with pytest.raises(OcrOutage):
        regions.read()
    assert regions.sink.stored == {}


@pytest.mark.parametrize(("tries", "state"), [(0, PageState.PENDING), (1, PageState.FAILED)])
def test_without_its_layout_a_page_gets_one_later_try(regions, tries, state):
    regions.layouts.error = LayoutUnavailable()
    result = regions.read(tries=tries)[1]
    assert result.state is state
    assert state is PageState.PENDING or result.error.code == "layout_unavailable"
    assert regions.server.requests == []


def test_a_page_that_cannot_be_drawn_fails_in_its_place(regions):
    regions.source.errors = {2: PageUnrenderable(page=2)}
    regions.layouts.boxes = {number: [TEXT] for number in (1, 2, 3)}
    stored = regions.read(3)
    assert [stored[number].state for number in (1, 2, 3)] == [
        PageState.OCR, PageState.FAILED, PageState.OCR,
    ]  # fmt: skip
    assert stored[3].markdown == region_mark(regions.document, 3, TEXT.bbox).text


def test_auto_reads_an_ordinary_page_as_a_whole_without_its_layout(auto):
    auto.layouts.boxes[1] = [TEXT]
    result = auto.read()[1]
    assert (result.markdown, result.regions) == (auto.mark().text, ())
    assert auto.layouts.asked == []
    assert len(auto.server.requests) == 1


@pytest.mark.parametrize("flawed", [CUT, fake.LOOP, fake.EMPTY])
def test_a_flawed_whole_reading_is_followed_by_regions(auto, flawed):
    auto.layouts.boxes[1] = [TITLE, TEXT]
    auto.server.script(auto.mark(), flawed)
    result = auto.read()[1]
    assert (result.state, codes(result)) == (PageState.OCR, [])
    assert [region.label for region in result.regions] == ["doc_title", "text"]
    assert len(auto.requests()) == 1


def test_regions_that_are_cut_as_well_do_not_replace_the_longer_text(auto):
    auto.layouts.boxes[1] = [TEXT]
    auto.server.script(auto.mark(), CUT)
    short = fake.Reply(text="One.", finish_reason="length")
    answer(auto, TEXT, short, short)
    result = auto.read()[1]
    assert (result.state, result.markdown) == (PageState.TRUNCATED, "One. Two. Three, and")
    assert codes(result) == ["page_truncated"]


@pytest.mark.parametrize("reply", [fake.refusal(400), fake.refusal(500)])
def test_regions_that_fail_keep_the_first_text(auto, reply):
    auto.layouts.boxes[1] = [TEXT]
    auto.server.script(auto.mark(), CUT, CUT)
    auto.server.always(region_mark(auto.document, 1, TEXT.bbox), reply)
    assert auto.read()[1].state is PageState.TRUNCATED


def test_without_a_layout_server_a_flawed_page_is_read_whole_again(auto):
    auto.layouts.error = LayoutUnavailable()
    auto.server.script(auto.mark(), fake.EMPTY)
    result = auto.read()[1]
    assert (result.state, result.markdown) == (PageState.OCR, auto.mark().text)


def test_an_empty_page_with_text_boxes_that_come_back_empty_fails(auto):
    auto.layouts.boxes[1] = [TEXT]
    auto.server.default = fake.EMPTY
    assert auto.read()[1].error.code == "ocr_empty"


def test_an_empty_page_without_text_boxes_is_a_page_without_text(auto):
    auto.layouts.boxes[1] = [PHOTO]
    auto.server.default = fake.EMPTY
    assert auto.read()[1].state is PageState.NO_TEXT
    assert len(auto.requests()) == 2


@pytest.mark.parametrize("mode", [LayoutMode.PAGE, LayoutMode.AUTO])
def test_a_page_that_is_only_a_loop_twice_fails(auto, mode):
    auto.layout = mode
    auto.server.default = fake.LOOP
    result = auto.read()[1]
    assert (result.state, result.error.code) == (PageState.FAILED, "ocr_repetition")
    assert len(auto.requests()) == 2


def test_a_returned_prompt_is_not_text(auto):
    auto.layout = LayoutMode.PAGE
    auto.server.script(auto.mark(), fake.Reply(text="Text Recognition:"))
    assert auto.read()[1].markdown == auto.mark().text


def test_a_cancelled_page_closes_all_its_requests(regions):
    regions.layouts.boxes[1] = [TITLE, TEXT, TABLE]
    gate = fake.Gate()
    regions.server.default = fake.Reply(gate=gate)

    async def cancel_when_asked():
        reading = asyncio.ensure_future(regions.parsing())
        await asyncio.to_thread(gate.arrived.wait, 10)
        await asyncio.sleep(0.2)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(cancel_when_asked())
    eventually(lambda: not regions.server.alive())
    assert {request.outcome for request in regions.server.requests} == {"disconnected"}
