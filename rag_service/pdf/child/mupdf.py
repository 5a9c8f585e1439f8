"""The only module that imports PyMuPDF; only the render child may import it.

Typed as Any: PyMuPDF's type hints cover half of it.
"""

from __future__ import annotations

import sys
from typing import Any

# If these packages are installed, PyMuPDF loads a layout model into every process.
for _companion in ("pymupdf.layout", "pymupdf4llm"):
    sys.modules[_companion] = None  # type: ignore[assignment]

import pymupdf as _pymupdf  # noqa: E402
from pymupdf import mupdf as _mupdf  # noqa: E402

pymupdf: Any = _pymupdf
mupdf: Any = _mupdf

# Advice and messages about broken files do not belong into the log.
pymupdf.no_recommend_layout()
pymupdf.TOOLS.mupdf_display_errors(False)
pymupdf.TOOLS.mupdf_display_warnings(False)
