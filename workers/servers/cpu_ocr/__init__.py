"""The CPU OCR server's parts: engine, turning, reading order, desk, HTTP."""
