"""The folder of real files and its manifest, as benchmarks and `make corpus` read them."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "manifest.tsv"


@dataclass(frozen=True)
class CorpusFile:
    """A row of the manifest: the file, what kind it is, what is right for it and why it is here."""

    path: Path
    name: str
    kind: str
    why: str
    right: str
    expected: str


def default_folder() -> Path:
    """RAG_CORPUS, else ../shared/corpus beside the repository; it need not exist."""
    return Path(os.environ.get("RAG_CORPUS") or ROOT.parent / "shared" / "corpus")


def read_manifest(folder: Path) -> list[CorpusFile]:
    """Every file the manifest names. Raises FileNotFoundError where there is no manifest."""
    with (folder / MANIFEST).open(newline="") as lines:
        return [
            CorpusFile(
                path=folder / row["file"],
                name=row["file"],
                kind=row["kind"],
                why=row["why"],
                right=row["right_behaviour"],
                expected=row["expect_contains"],
            )
            for row in csv.DictReader(lines, delimiter="\t")
        ]
