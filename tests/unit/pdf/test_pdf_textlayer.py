"""Which text layers are kept: one test for each rule, and texts that must pass all rules."""

from __future__ import annotations

import pytest

from rag_service.pdf.child.text_layer import assess_text_layer

ENGLISH = (
    "It was the custom of the house that all of the doors were to be shut by nine in the "
    "evening and that no one was to leave before the bell had been rung in the morning. "
) * 2
GERMAN = (
    "Die Türen des Hauses wurden am Abend von einem der Männer geschlossen und es war nicht "
    "mehr möglich, bis zum Morgen wieder auf die Straße zu kommen. "
)
GREEK = "Το σπίτι ήταν στην άκρη του χωριού και από εκεί το έβλεπε όποιος ερχόταν με τα πόδια. "
CHINESE = "我们在这个地方住了很多年，后来因为工作的关系，全家人都到了另外一个大城市生活。"
JAPANESE = "この家の扉は毎晩九時に閉められ、朝の鐘が鳴るまで誰も外に出ることはできなかった。"
KOREAN = "이 집의 문은 매일 밤 아홉 시에 닫히고 아침 종이 울릴 때까지 아무도 나갈 수 없었다."
ARABIC = "كان باب البيت يغلق كل ليلة في الساعة التاسعة ولا يخرج أحد حتى يدق جرس الصباح."
NUMBERS = "Total 1,204.50 12.03.2021 88 / 4411-07 EUR 9.99 NET 19 % VAT 1.90 DUE 11.89"


@pytest.mark.parametrize(
    "text", [ENGLISH, GERMAN, GREEK, CHINESE, JAPANESE, KOREAN, ARABIC, NUMBERS, "Page 4", "§ 12 a"]
)
def test_good_text_is_kept(text: str) -> None:
    assert assess_text_layer(text).healthy


@pytest.mark.parametrize("text", ["", " \n\t\xa0\n"])
def test_no_text_differs_from_bad_text(text: str) -> None:
    verdict = assess_text_layer(text)
    assert verdict.empty
    assert not verdict.healthy


@pytest.mark.parametrize("sign", ["\x02", "\ufffd", "\ue123", "\uffff", "\x00"])
def test_characters_without_meaning(sign: str) -> None:
    few = ENGLISH.replace(" ", f" {sign}", 5)
    assert assess_text_layer(few).healthy
    many = ENGLISH.replace(" ", sign)
    assert assess_text_layer(many).reason == "characters without meaning"


def test_bytes_swapped_into_rare_chinese() -> None:
    swapped = "Multicolor Black and more".encode("utf-16-le").decode("utf-16-be")
    assert assess_text_layer(swapped).reason == "implausible Chinese characters"


@pytest.mark.parametrize("step", [1, -1])
def test_letters_shifted_by_one(step: int) -> None:
    shifted = "".join(
        chr((ord(letter) - 97 + step) % 26 + 97) if letter.isalpha() else letter
        for letter in ENGLISH.lower()
    )
    assert assess_text_layer(shifted).reason == "letters shifted by one"


def test_a_page_of_unknown_words() -> None:
    assert assess_text_layer("qwrk plmf zxbn vghj " * 30).reason == "no known words"
    assert assess_text_layer("AX10 BX20 4711 0815 CX30 1234 " * 60).healthy


def test_hidden_text_on_a_picture_of_the_page() -> None:
    assert assess_text_layer(ENGLISH, picture=True, hidden=0.4).healthy
    reason = "hidden text over a picture of the page"
    assert assess_text_layer(ENGLISH, picture=True, hidden=0.6).reason == reason
    assert assess_text_layer(ENGLISH, picture=False, hidden=0.6).healthy


def test_a_few_words_on_a_picture_of_the_page() -> None:
    stamp = "Received 12 March by the office"
    assert assess_text_layer(stamp).healthy
    assert assess_text_layer(stamp, picture=True).reason == "a picture of the page with little text"


def test_a_few_characters() -> None:
    assert assess_text_layer("1 | _ ~ ^ ' -").reason == "too little text to trust"
