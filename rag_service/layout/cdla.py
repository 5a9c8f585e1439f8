"""The CDLA model: PicoDet in ONNX, ten kinds of blocks.

Its graph takes one picture at a time, so the pictures of a batch run in parallel threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from rag_service.layout.boxes import bbox_of, in_order, without_overlaps
from rag_service.layout.model_input import decode
from rag_service.layout.page_layout import LayoutBox

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rag_service.layout.layout_model import Pixels

    Floats = NDArray[np.float32]

# The model's own labels in the order of its scores, mapped to the 25 of labels.py.
LABELS = (
    "text", "paragraph_title", "image", "figure_title", "table", "figure_title", "header",
    "footer", "reference", "display_formula",
)  # fmt: skip
WIDTH, HEIGHT = 608, 800
# The side in pixels of the squares of each level of the model.
STRIDES = (8, 16, 32, 64)
THRESHOLD = 0.5
SAME_BLOCK = 0.5
# ImageNet's mean and standard deviation, with which the model was trained.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


class Cdla:
    """One session, used from several threads."""

    name = "cdla"

    def __init__(self, file: Path, *, threads: int, batch: int) -> None:
        """Load the model. Raises what ONNX Runtime raises for an invalid file."""
        options = onnxruntime.SessionOptions()
        # More threads per picture are not faster, and an arena doubles the memory.
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        self._session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        self.most = min(threads, batch)
        self._threads = ThreadPoolExecutor(self.most, thread_name_prefix="cdla")

    def read(self, jpeg: bytes) -> Pixels:
        return decode(jpeg, WIDTH, HEIGHT)

    def find(self, pictures: Sequence[Pixels]) -> list[list[LayoutBox]]:
        return list(self._threads.map(self._find, pictures))

    def _find(self, picture: Pixels) -> list[LayoutBox]:
        values = (picture.astype(np.float32) / 255 - MEAN) / DEVIATION
        outputs = self._session.run(None, {"image": values.transpose(2, 0, 1)[None]})
        return in_order(without_overlaps(_boxes(outputs)))


def _boxes(outputs: Sequence[Any]) -> list[LayoutBox]:
    """Convert the model's answer for one picture: the scores of each level, then the distances."""
    levels = len(STRIDES)
    found = [
        _level(scores[0], distances[0], stride)
        for scores, distances, stride in zip(
            outputs[:levels], outputs[levels:], STRIDES, strict=True
        )
    ]
    corners = np.concatenate([corners for corners, _ in found])
    scores = np.concatenate([scores for _, scores in found])
    boxes = []
    for number, label in enumerate(LABELS):
        for place in _best(corners, scores[:, number]):
            box = bbox_of(*(corners[place] / (WIDTH, HEIGHT, WIDTH, HEIGHT)))
            if box is not None:
                boxes.append(LayoutBox(label, float(scores[place, number]), box))
    return boxes


def _level(scores: Floats, distances: Floats, stride: int) -> tuple[Floats, Floats]:
    """Return the corners in pixels, n x 4, and scores, n x 10, of squares with a block's centre.

    Each side's distance is a distribution over whole strides (Generalized Focal Loss).
    """
    places = np.flatnonzero(scores.max(axis=1) > THRESHOLD)
    columns = -(-WIDTH // stride)
    middles = np.stack([places % columns, places // columns], axis=1) + 0.5
    shares = np.exp(distances.reshape(len(distances), 4, -1)[places])
    shares /= shares.sum(axis=2, keepdims=True)
    sides = shares @ np.arange(shares.shape[2], dtype=np.float32)
    corners = np.concatenate([middles - sides[:, :2], middles + sides[:, 2:]], axis=1) * stride
    return corners.astype(np.float32), scores[places]


def _best(corners: Floats, scores: Floats) -> list[int]:
    """Return the index of the best box of each block, the best first (non-maximum suppression)."""
    waiting = [int(p) for p in np.argsort(-scores) if scores[p] > THRESHOLD]
    kept: list[int] = []
    while waiting:
        kept.append(waiting[0])
        waiting = [p for p in waiting[1:] if _overlap(corners[p], corners[kept[-1]]) <= SAME_BLOCK]
    return kept


def _overlap(one: Floats, other: Floats) -> float:
    """Return the intersection over union."""
    width, height = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    shared = max(width, 0.0) * max(height, 0.0)
    return float(shared / max(_area(one) + _area(other) - shared, 1e-6))


def _area(box: Floats) -> float:
    return float((box[2] - box[0]) * (box[3] - box[1]))
