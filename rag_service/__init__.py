"""Document ingest pipeline: PDFs and scans to a searchable knowledgebase."""

__version__ = "0.1.0"
