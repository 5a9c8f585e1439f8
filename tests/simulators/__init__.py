"""Simulated OCR servers and virtual time, for tests and benchmarks."""
