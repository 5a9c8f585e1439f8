"""The expected outcome of each file of the corpus, and the faults of an actual outcome.

`expectation_for` translates the manifest's descriptions, which are those of its collector.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from benchmarks.corpus import CorpusFile

# The engine of the default stack is the smallest one; native text is exact.
OCR_RECALL = 0.7
# The most letters that may be found on a drawing or a photo without text.
FEW_LETTERS = 30
# Shorter words occur in too many other words.
GLUED_LETTERS = 4
DPI = 150.0
GOOD_STATES = frozenset({"native", "ocr", "blank", "no_text", "truncated"})


@dataclass(frozen=True)
class PageOutcome:
    """A page as the API returns it."""

    number: int
    state: str
    markdown: str
    dpi: float | None
    error: str | None


@dataclass
class Outcome:
    """The outcome of a file: refused on upload, or a document with its pages.

    `opened`: the same document after its password was given.
    """

    name: str
    refused: str | None = None
    status: str | None = None
    error: str | None = None
    message: str = ""
    pages: list[PageOutcome] = field(default_factory=list)
    seconds: float = 0.0
    opened: Outcome | None = None

    @property
    def text(self) -> str:
        return "\n".join(page.markdown for page in self.pages)

    @property
    def counts(self) -> Counter[str]:
        return Counter(page.state for page in self.pages)


@dataclass(frozen=True)
class Expectation:
    """The expected outcome of a file.

    `codes`: the errors with which it may fail or be refused; empty: it must be processed.
    `states`: the allowed states of its pages; `some`: at least one page has one of these.
    `pages`: pages whose state is known. `recall`: the share of `words` that must be found.
    """

    codes: frozenset[str] = frozenset()
    states: frozenset[str] = GOOD_STATES
    some: frozenset[str] = frozenset()
    pages: dict[int, str] = field(default_factory=dict)
    words: str = ""
    recall: float = 1.0
    most_letters: int | None = None
    capped: bool = False
    page_codes: frozenset[str] = frozenset()
    password: str | None = None


NATIVE = Expectation(states=frozenset({"native", "blank"}), some=frozenset({"native"}))
BY_OCR = Expectation(
    states=frozenset({"ocr", "blank", "no_text", "truncated"}),
    some=frozenset({"ocr"}),
    recall=OCR_RECALL,
)
PER_PAGE = Expectation(some=frozenset({"native"}))
DAMAGED = Expectation(some=frozenset({"native", "ocr"}))
EMPTY = Expectation(most_letters=0)
PHOTO = Expectation(most_letters=FEW_LETTERS)
CAPPED = Expectation(
    codes=frozenset({"pages_failed"}),
    states=frozenset({"ocr", "no_text", "blank", "failed"}),
    page_codes=frozenset({"page_too_large"}),
    capped=True,
)
HANGS = Expectation(
    codes=frozenset({"pages_failed"}),
    states=GOOD_STATES | {"failed"},
    some=frozenset({"native"}),
    page_codes=frozenset({"page_timeout", "page_unrenderable"}),
)


def ends_with(code: str) -> Expectation:
    """Expect the file to fail as a whole, or to be refused, with this code."""
    return Expectation(codes=frozenset({code}))


# The first prefix of a manifest's right_behaviour that matches decides.
RULES = (
    ("FAIL:empty_file", ends_with("empty_file")),
    ("FAIL:not_a_pdf", ends_with("unsupported_type")),
    ("FAIL:zero_pages", ends_with("empty_pdf")),
    ("FAIL:corrupted", ends_with("corrupt_pdf")),
    ("FAIL:encrypted", ends_with("encrypted_pdf")),
    ("DONE with empty text", EMPTY),
    ("DONE by OCR with the pixel size CAPPED", CAPPED),
    ("DONE by OCR", BY_OCR),
    ("DONE from the ORIGINAL", NATIVE),
    ("DONE; per page", PER_PAGE),
    ("good pages DONE", DAMAGED),
    ("page render killed", HANGS),
    ("image input without useful text", PHOTO),
    ("image input", BY_OCR),
)
# The manifest describes a whole file by its first page; these were checked by hand.
OVERRULED = {
    # The left column of page 3 is glyph numbers, not letters: only OCR can read it.
    "born_digital/redp5110_sampled.pdf": PER_PAGE,
    # %PDF and nothing else: by that header it counts as a damaged PDF.
    "broken/invalid.pdf": ends_with("corrupt_pdf"),
    # A scan of a page with a typed date, which is the only text in its text layer.
    "codec/malformed-from-issue-932.pdf": BY_OCR,
    # It has a healthy text layer, so nothing is rendered at any size.
    "geometry/skinnypage.pdf": NATIVE,
    # It shows top, left, right, bottom and 6, and must be turned upright to be read.
    "image/Portrait_6.jpg": BY_OCR,
}
WORDS = {
    "codec/malformed-from-issue-932.pdf": "2021",
    "image/Portrait_6.jpg": "top left right bottom 6",
    "encrypted/2206.01062_pg3.pdf": "DocLayNet Large Human-Annotated Dataset",
    "encrypted/r6-user-password.pdf": "pdf encryption test",
}
PAGES = {
    "born_digital/multi-page-mixed.pdf": dict.fromkeys((1, 2, 3), "ocr")
    | dict.fromkeys((4, 5, 6), "native"),
    "born_digital/redp5110_sampled.pdf": {2: "native", 3: "ocr", 17: "blank"},
    "text_trap/TAMReview.pdf": {1: "native"} | dict.fromkeys(range(2, 23), "ocr"),
}
PASSWORDS = {
    "encrypted/2206.01062_pg3.pdf": "1234",
    "encrypted/r6-user-password.pdf": "asdfzxcv",
}


def expectation_for(file: CorpusFile) -> Expectation:
    """Return a file's expectation. Raises ValueError if the manifest's description is unknown."""
    return replace(
        OVERRULED.get(file.name) or _rule(file),
        pages=PAGES.get(file.name, {}),
        words=expected_words(file),
        password=PASSWORDS.get(file.name),
    )


def _rule(file: CorpusFile) -> Expectation:
    for beginning, expectation in RULES:
        if file.right.startswith(beginning):
            return expectation
    raise ValueError(f"{file.name}: {file.right}")


def expected_words(file: CorpusFile) -> str:
    """Return the reference text beside the file, else those of WORDS, else the manifest's."""
    reference = file.path.with_suffix(".gt.txt")
    if reference.exists():
        return reference.read_text()
    if file.name in WORDS:
        return WORDS[file.name]
    if file.expected.startswith("auto:"):
        # The manifest cut it at a length, usually within a word.
        return file.expected.removeprefix("auto:").rpartition(" ")[0]
    words = file.expected.partition("(see ")[0].strip()
    return "" if words.startswith("see ") else words


def faults(expected: Expectation, outcome: Outcome) -> list[str]:
    """Return a sentence for each difference from the expectation; empty: the outcome is right."""
    found = list(_status_faults(expected, outcome))
    if outcome.refused or (expected.codes and not outcome.pages):
        return found + _password_faults(expected, outcome)
    found += _page_faults(expected, outcome)
    found += _word_faults(expected, outcome)
    return found


def _status_faults(expected: Expectation, outcome: Outcome) -> Iterable[str]:
    code = outcome.refused or outcome.error
    may_succeed = not expected.codes or bool(expected.page_codes)
    if outcome.status == "processed":
        if not may_succeed:
            yield f"processed, not {' or '.join(sorted(expected.codes))}"
        if not outcome.pages:
            yield "processed without pages"
    elif code not in expected.codes:
        wanted = " or ".join(sorted(expected.codes)) or "processed"
        yield f"{outcome.status or 'refused'} {code}, not {wanted}: {outcome.message}"


def _password_faults(expected: Expectation, outcome: Outcome) -> list[str]:
    if expected.password is None:
        return []
    found = [] if "password" in outcome.message else ["the error does not mention a password"]
    if outcome.opened is None:
        return [*found, "not redone with the password"]
    opened = Expectation(some=frozenset({"native"}), words=expected.words)
    return found + [f"with the password: {fault}" for fault in faults(opened, outcome.opened)]


def _page_faults(expected: Expectation, outcome: Outcome) -> Iterable[str]:
    for page in outcome.pages:
        wanted = expected.pages.get(page.number)
        if wanted and page.state != wanted:
            yield f"page {page.number} is {page.state}, not {wanted}"
        elif page.state not in expected.states:
            yield f"page {page.number} is {page.state} ({page.error or 'no error'})"
        if page.state == "failed" and page.error not in expected.page_codes:
            yield f"page {page.number} failed as {page.error}"
        if expected.capped and page.state == "ocr" and (page.dpi or DPI) >= DPI:
            yield f"page {page.number} was rendered at {page.dpi} DPI"
    if expected.some and not expected.some & outcome.counts.keys():
        yield f"no page is {' or '.join(sorted(expected.some))}"


def _word_faults(expected: Expectation, outcome: Outcome) -> Iterable[str]:
    letters = sum(map(str.isalnum, outcome.text))
    if expected.most_letters is not None and letters > expected.most_letters:
        yield f"invented text: {outcome.text[:60]!r}"
    missing = missing_words(expected.words, outcome.text)
    if expected.recall < 1:
        missing = [word for word in missing if not is_glued(word, outcome.text)]
    share = 1 - len(missing) / max(1, len(words_of(expected.words)))
    if share < expected.recall:
        yield f"{share:.0%} of the words found; missing: {' '.join(missing[:8])}"


def words_of(text: str) -> list[str]:
    """Return the words, with ligatures and full-width forms as plain letters."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    # A word hyphenated at a line end counts as one.
    return re.findall(r"\w+", re.sub(r"(?<=[^\W\d_])[-\u00ad]\n(?=[^\W\d_])", "", plain))


def missing_words(wanted: str, text: str) -> list[str]:
    """Return the words that the text lacks; order is ignored, repeated words count each time."""
    left = Counter(words_of(text))
    missing = []
    for word in words_of(wanted):
        if left[word]:
            left[word] -= 1
        else:
            missing.append(word)
    return missing


def is_glued(word: str, text: str) -> bool:
    """Return True if a longer word is in the text without spaces, as small engines write it."""
    return len(word) >= GLUED_LETTERS and word in "".join(words_of(text))
