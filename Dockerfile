# The image of the service. API, workers, maintenance and Flower are commands of it.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/rag_service \
    && /opt/rag_service/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim-bookworm
# Ghostscript shrinks scans that are too large for a RunPod job; without it a slower shrinker runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ghostscript \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home --home-dir /var/lib/rag_service rag_service
COPY --from=build /opt/rag_service /opt/rag_service
ENV PATH=/opt/rag_service/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAG_SERVICE_DATA_DIR=/var/lib/rag_service \
    TMPDIR=/var/lib/rag_service
USER rag_service
WORKDIR /var/lib/rag_service
# A broken environment fails the build here, not the first document.
RUN rag-service --version \
    && REDIS_URL=redis://smoke-test python -c "import faster_paddle, kombu.transport.redis, pymupdf, workers.celery_app"

ENTRYPOINT ["rag-service"]
