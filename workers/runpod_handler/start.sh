#!/bin/sh
# The worker's first process. It becomes the handler, which starts SGLang and ends if SGLang ends.
set -eu

# With a network volume, the weights are downloaded once for all cold starts.
if [ -d /runpod-volume ]; then
    export HF_HOME="${HF_HOME:-/runpod-volume/huggingface}"
fi

# SGLANG_EXTRA_ARGS is several arguments, so it must not be quoted.
# shellcheck disable=SC2086
exec /opt/handler-venv/bin/python -m workers.runpod_handler.handler \
    python3 -m sglang.launch_server \
    --model-path "${SGLANG_MODEL_PATH:-zai-org/GLM-OCR}" \
    --served-model-name glm-ocr \
    --host 127.0.0.1 --port 5002 \
    --context-length 32768 \
    --chunked-prefill-size 8192 \
    --mem-fraction-static "${SGLANG_MEM_FRACTION:-0.80}" \
    --enable-metrics \
    ${SGLANG_EXTRA_ARGS:-}
