"""The layout server: request queue, HTTP, and one server per node."""
