"""PostgreSQL, Valkey and our own processes, started from wheels and supervised; for the CLI."""

from rag_service.embedded.folder import require_free_port
from rag_service.embedded.stack import EmbeddedStack
from rag_service.runtime.supervisor import Program, ProgramStatus, Supervisor

__all__ = ["EmbeddedStack", "Program", "ProgramStatus", "Supervisor", "require_free_port"]
