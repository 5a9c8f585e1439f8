"""Frames pass the pipe unchanged, whatever they contain and however the bytes are split."""

from __future__ import annotations

import asyncio
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.pdf import pipe_frames
from rag_service.pdf.pipe_frames import Frame

HEADS = st.dictionaries(
    st.text(max_size=8),
    st.one_of(st.none(), st.integers(), st.text(st.characters(exclude_categories=()))),
    max_size=5,
)
FRAMES = st.lists(st.builds(Frame, HEADS, st.binary(max_size=100)), max_size=5)


@given(FRAMES)
def test_a_reader_receives_what_was_written(sent: list[Frame]) -> None:
    stream = BytesIO(b"".join(map(pipe_frames.encode, sent)))
    assert [pipe_frames.read(stream) for _ in sent] == sent
    assert pipe_frames.read(stream) is None


@given(FRAMES, st.integers(1, 7))
def test_the_parent_receives_frames_in_pieces(sent: list[Frame], piece: int) -> None:
    async def work() -> list[Frame]:
        reader = asyncio.StreamReader()
        data = b"".join(map(pipe_frames.encode, sent))

        async def feed() -> None:
            for start in range(0, len(data), piece):
                reader.feed_data(data[start : start + piece])
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.create_task(feed())
        received = [await pipe_frames.receive(reader) for _ in sent]
        await feeding
        with pytest.raises(asyncio.IncompleteReadError):
            await pipe_frames.receive(reader)
        return received

    assert asyncio.run(work()) == sent
