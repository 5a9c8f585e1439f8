"""PP-DocLayoutV3 with random weights, compared with transformers' own post-processing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rag_service.config.loader import load_settings
from rag_service.config.options import LayoutOptions
from rag_service.errors import ConfigurationError
from rag_service.layout import pp_doclayout
from rag_service.layout.boxes import bbox_of
from rag_service.layout.labels import LABELS
from rag_service.layout.model_loader import load_model
from tests.fakes.page_pictures import blank, two_columns

torch = pytest.importorskip("torch", reason="needs the extra layout-torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The architecture with random weights and, as on the hub, too few label names."""
    torch.manual_seed(7)
    config = transformers.PPDocLayoutV3Config(num_labels=len(LABELS))
    path = tmp_path_factory.mktemp("weights")
    transformers.PPDocLayoutV3ForObjectDetection(config).save_pretrained(path)
    stored = json.loads((path / "config.json").read_text())
    stored["id2label"] = {str(i): "formula" if "formula" in n else n for i, n in enumerate(LABELS)}
    stored["label2id"] = {name: int(i) for i, name in stored["id2label"].items()}
    (path / "config.json").write_text(json.dumps(stored))
    return path


def settings(folder: Path) -> LayoutOptions:
    changes = {"model": "pp_doclayout_v3", "folder": folder, "device": "cpu"}
    return load_settings().layout.model_copy(update=changes)


@pytest.mark.timeout(600)
def test_a_batch_is_read_at_once_and_each_page_is_independent(folder, monkeypatch) -> None:
    # Random weights find one page-wide box everywhere, which would replace the others.
    monkeypatch.setattr(pp_doclayout, "THRESHOLD", 0.0)
    monkeypatch.setattr(pp_doclayout, "without_overlaps", list)
    model = load_model(settings(folder))
    page, empty = model.read(two_columns()), model.read(blank())
    first, other, last = model.find([page, empty, page])
    assert first
    assert first == last != other
    assert {box.label for box in (*first, *other)} <= set(LABELS)


def test_boxes_labels_and_order_are_those_that_transformers_finds() -> None:
    torch.manual_seed(3)
    pages, queries = 2, 40
    labels = torch.randint(len(LABELS), (pages, queries))
    logits = torch.full((pages, queries, len(LABELS)), -9.0)
    strength = torch.linspace(-3, 3, queries).expand(pages, queries)
    logits.scatter_(2, labels[..., None], strength[..., None])
    outputs = SimpleNamespace(
        logits=logits,
        pred_boxes=torch.rand(pages, queries, 4) * 0.3 + 0.3,
        order_logits=torch.randn(pages, queries, queries) * 3,
        out_masks=torch.zeros(pages, queries, 200, 200),
    )
    expected = transformers.PPDocLayoutV3ImageProcessor().post_process_object_detection(
        outputs, threshold=pp_doclayout.THRESHOLD, target_sizes=[(1, 1)] * pages
    )
    found = pp_doclayout._ordered(torch, outputs)
    for page, boxes in zip(expected, found, strict=True):
        assert [LABELS[number] for number in page["labels"]] == [box.label for box in boxes]
        assert [bbox_of(*corners) for corners in page["boxes"].tolist()] == [b.bbox for b in boxes]
        assert page["scores"].tolist() == pytest.approx([box.score for box in boxes])
        assert 0 < len(boxes) < queries


def test_a_folder_without_weights_is_named(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json is missing"):
        load_model(settings(tmp_path))


def test_damaged_weights_are_named(folder, tmp_path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigurationError, match=r"layout\.model: pp_doclayout_v3 cannot load"):
        load_model(settings(tmp_path))
