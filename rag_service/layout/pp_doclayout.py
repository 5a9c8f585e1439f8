"""PP-DocLayoutV3: 25 kinds of blocks and their reading order.

It needs transformers and torch, which the extra layout-torch installs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rag_service.config.options import LayoutOptions
from rag_service.layout.boxes import bbox_of, without_overlaps
from rag_service.layout.labels import LABELS
from rag_service.layout.layout_model import thread_count
from rag_service.layout.model_input import decode
from rag_service.layout.page_layout import LayoutBox

if TYPE_CHECKING:
    from rag_service.layout.layout_model import Pixels

SIDE = 800
# The GLM-OCR SDK's value.
THRESHOLD = 0.3


class PpDocLayout:
    """One copy of the weights, on the GPU if there is one."""

    name = "pp_doclayout_v3"

    def __init__(self, settings: LayoutOptions) -> None:
        """Load the model. Raises what transformers raises for a folder without such a model."""
        import torch
        from transformers import PPDocLayoutV3ForObjectDetection as Detector

        torch.set_num_threads(thread_count(settings))
        self.most = settings.batch_size
        self._torch = torch
        self._device = _device(settings.device)
        # The published configuration has one name for two classes, and formulas would be lost.
        model = Detector.from_pretrained(
            settings.folder,
            local_files_only=True,
            id2label=dict(enumerate(LABELS)),
            label2id={label: number for number, label in enumerate(LABELS)},
        )
        self._model = model.to(self._device).eval()

    def read(self, jpeg: bytes) -> Pixels:
        return decode(jpeg, SIDE, SIDE)

    def find(self, pictures: Sequence[Pixels]) -> list[list[LayoutBox]]:
        torch = self._torch
        values = torch.stack([torch.from_numpy(picture.copy()) for picture in pictures])
        values = values.to(self._device).permute(0, 3, 1, 2).float() / 255
        with torch.inference_mode():
            outputs = self._model(pixel_values=values)
        return [without_overlaps(boxes) for boxes in _ordered(torch, outputs)]


def _device(chosen: str) -> str:
    import torch

    if chosen == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return chosen


def _ordered(torch: Any, outputs: Any) -> list[list[LayoutBox]]:
    """Return each picture's boxes over the threshold, in the model's reading order."""
    scores, labels = outputs.logits.sigmoid().max(dim=-1)
    # For each pair: the probability that the first is read before the second.
    first = outputs.order_logits.sigmoid().triu(1)
    second = (1 - first.transpose(1, 2)).tril(-1)
    before = (first + second).sum(dim=1)
    middles, sizes = outputs.pred_boxes.split(2, dim=-1)
    corners = torch.cat([middles - sizes / 2, middles + sizes / 2], dim=-1)
    pages = zip(*(part.tolist() for part in (scores, labels, corners, before)), strict=True)
    return [_boxes(*page) for page in pages]


def _boxes(
    scores: list[float],
    labels: list[int],
    corners: list[list[float]],
    before: list[float],
) -> list[LayoutBox]:
    boxes = []
    for place in sorted(range(len(scores)), key=before.__getitem__):
        bbox = bbox_of(*corners[place])
        if scores[place] >= THRESHOLD and bbox is not None:
            boxes.append(LayoutBox(LABELS[labels[place]], scores[place], bbox))
    return boxes
