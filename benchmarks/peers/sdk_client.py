"""Runs the glmocr SDK on files, with boxes that are given instead of a layout model.

Runs with the Python of the SDK's own environment and imports nothing of this repository.
Its argument is a job, and what the SDK returned is the last line of standard output, both as JSON:
{"host", "port", "files", "pages": [[{"label", "bbox"}]], "layout_fails", "draws", "one_by_one"}
and {"error", "results": [{"markdown", "pages"}]}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import glmocr.layout  # type: ignore[import-not-found]
import numpy as np
from glmocr.api import GlmOcr  # type: ignore[import-not-found]
from glmocr.utils.visualization_utils import (  # type: ignore[import-not-found]
    draw_layout_boxes,
)


class GivenBoxes:
    """Stands in for the SDK's layout detector: the pages' boxes in turn, labels sorted as it does.

    Its interface and the keys of a region are those of glmocr 0.1.5's PPDocLayoutDetector.
    """

    pages: list[list[dict[str, Any]]]
    fails = False

    def __init__(self, config: Any) -> None:
        self.batch_size = config.batch_size
        self._tasks = {
            label: task for task, labels in config.label_task_mapping.items() for label in labels
        }

    def start(self) -> None:
        """There is no model to load."""

    def stop(self) -> None:
        """There is no model to give back."""

    def process(
        self,
        images: list[Any],
        save_visualization: bool = False,
        global_start_idx: int = 0,
        use_polygon: bool = False,
    ) -> tuple[list[list[dict[str, Any]]], dict[int, Any]]:
        """Regions of each image; where asked for, pictures of them by the page's index."""
        if self.fails:
            raise RuntimeError("The layout model crashed.")
        numbered = dict(enumerate(images, start=global_start_idx))
        boxes = {number: self.pages[number % len(self.pages)] for number in numbered}
        pictures = {
            number: draw_layout_boxes(
                image=np.array(image),
                boxes=_in_pixels(boxes[number], image),
                use_polygon=use_polygon,
            )
            for number, image in numbered.items()
            if save_visualization
        }
        return [self._regions(each) for each in boxes.values()], pictures

    def _regions(self, boxes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        read = [box for box in boxes if self._tasks[box["label"]] != "abandon"]
        return [
            {
                "index": index,
                "label": box["label"],
                "score": 1.0,
                "bbox_2d": list(box["bbox"]),
                "polygon": [],
                "task_type": self._tasks[box["label"]],
            }
            for index, box in enumerate(read)
        ]


def _in_pixels(boxes: list[dict[str, Any]], image: Any) -> list[dict[str, Any]]:
    sides = (image.width, image.height) * 2
    return [
        {
            "label": box["label"],
            "score": 1.0,
            "coordinate": [
                edge * side // 1000 for edge, side in zip(box["bbox"], sides, strict=True)
            ],
        }
        for box in boxes
    ]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What the SDK gives back for the job's files, as its callers see it."""
    GivenBoxes.pages, GivenBoxes.fails = job["pages"], job["layout_fails"]
    files = job["files"]
    calls = [[file] for file in files] if job["one_by_one"] else [files]
    glmocr.layout.PPDocLayoutDetector = GivenBoxes
    try:
        with GlmOcr(
            mode="selfhosted", ocr_api_host=job["host"], ocr_api_port=job["port"]
        ) as parser:
            results = [
                result
                for call in calls
                for result in parser.parse(call, save_layout_visualization=job["draws"])
            ]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "results": []}
    return {
        "error": None,
        "results": [{"markdown": r.markdown_result, "pages": r.json_result} for r in results],
    }


if __name__ == "__main__":
    answer = run(json.loads(sys.argv[1]))
    print("\n" + json.dumps(answer))
