"""Starts PostgreSQL and Valkey from wheels, and supervises them with the service's programs."""

from rag_service.embedded.folder import require_free_port
from rag_service.embedded.stack import EmbeddedStack
from rag_service.runtime.supervisor import Program, ProgramStatus, Supervisor

__all__ = ["EmbeddedStack", "Program", "ProgramStatus", "Supervisor", "require_free_port"]
