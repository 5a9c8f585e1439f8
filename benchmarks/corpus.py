"""The folder of real files and its manifest, as benchmarks and `make corpus` read them."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable
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
    """Return every file the manifest names. Raises FileNotFoundError if there is no manifest."""
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


def run_on_corpus(description: str, compare: Callable[[Path], None]) -> None:
    """A benchmark's command line: compare on the folder that the caller names, or the usual one."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("corpus", nargs="?", type=Path, default=default_folder())
    try:
        compare(parser.parse_args().corpus)
    except FileNotFoundError as error:
        sys.exit(f"{error}: name the corpus folder or set RAG_CORPUS.")
