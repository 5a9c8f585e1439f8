"""The CPU OCR server: engine, page orientation, text order, request queue, HTTP."""
