"""A known page, by which a server shows that it reads, and answers that decline to read one."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rag_service.ocr.cleanup.refusal import is_refusal
from rag_service.ocr.known_page import COMMENT, known_page, known_page_size


@given(pixels=st.integers(0, 10**9), dpi=st.integers(50, 600))
def test_the_known_page_is_as_large_as_the_picture_but_not_larger_than_a4(pixels, dpi):
    width, height = known_page_size(pixels, dpi)
    a4 = 8.27 * 11.69 * dpi * dpi
    assert width % 28 == height % 28 == 0
    assert width < height
    assert width * height <= a4 * 1.1
    assert width * height >= min(pixels, a4) * 0.9


@pytest.mark.parametrize("size", [known_page_size(0, 72), known_page_size(10**7, 300)])
def test_the_known_page_is_a_picture_with_large_writing(size):
    picture = Image.open(io.BytesIO(known_page(*size)))
    assert (picture.size, picture.info["comment"]) == (size, COMMENT)
    ink = sum(picture.convert("L").histogram()[:128]) / (size[0] * size[1])
    assert 0.02 < ink < 0.3


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that.",
        "I’m sorry, I cannot view images.",
        "Sorry, I can't help with this request.",
        "I cannot read this picture.",
        "I am unable to process images.",
        "I don't see any image. Please upload one.",
        "Unfortunately, I am not able to extract text from this document.",
        "As an AI language model, I cannot access pictures.",
        "There is no image that I can see: I do not have access to it.",
        "Leider kann ich das Bild nicht lesen.",
        "Je ne peux pas lire cette image.",
        "Lo siento, no puedo ver la imagen.",
        "抱歉，我无法识别这张图片。",
        "申し訳ありませんが、画像を読み取れません。",
    ],
)
def test_an_answer_that_declines_is_a_refusal(text):
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "HARBOUR LANTERN MEADOW COPPER",
        "I am sorry to hear of your loss. Yours, Mary",
        "Unfortunately the delivery of 3 May was late.",
        "No. 17",
        "Invoice 4711: the goods cannot be returned.",
        "I'm sorry, but I can't assist with that. " * 20,
    ],
)
def test_a_text_with_an_apology_is_no_refusal(text):
    assert not is_refusal(text)
