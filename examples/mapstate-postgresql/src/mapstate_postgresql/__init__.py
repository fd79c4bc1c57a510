"""States of mapstate in PostgreSQL: ``postgresql://user:password@host:5432/database``."""

from mapstate_postgresql.backend import PostgresqlBackend
from mapstate_postgresql.store import PostgresqlStore

__all__ = ["PostgresqlBackend", "PostgresqlStore"]
