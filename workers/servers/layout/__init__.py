"""The layout server's parts: desk, HTTP, one a node."""
