"""The database connections that processes need, compared with what PostgreSQL allows."""

import pytest

from rag_service.config.loader import get_settings
from rag_service.database import connection_budget
from rag_service.database.connection_budget import Allowed, shortage_of


@pytest.mark.parametrize(
    ("needed", "in_use", "is_short"), [(60, 37, False), (60, 38, True), (98, 0, True)]
)
def test_a_shortage_is_named_with_its_figures(needed, in_use, is_short):
    sentence = shortage_of({"this worker": needed}, Allowed(97, in_use))
    if not is_short:
        assert sentence is None
        return
    assert f"Up to {needed} database connections" in sentence
    assert f"allows 97, of which {in_use} are in use" in sentence
    assert "max_connections" in sentence
    assert "OCR_WORKER_CONCURRENCY" in sentence


def test_the_default_service_fits_into_postgresqls_default():
    needed = connection_budget.service_connections(get_settings())
    assert set(needed) == {"the API", "maintenance", "the prepare worker", "the ocr worker"}
    assert shortage_of(needed, Allowed(97, 5)) is None


def test_twenty_forks_fit_into_postgresqls_default():
    settings = get_settings()
    ocr = settings.ocr.model_copy(update={"worker_concurrency": 20})
    needed = connection_budget.service_connections(settings.model_copy(update={"ocr": ocr}))
    assert needed["the ocr worker"] == 41
    assert shortage_of(needed, Allowed(97, 5)) is None
