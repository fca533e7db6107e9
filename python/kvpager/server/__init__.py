"""An OpenAI-compatible HTTP server over `AsyncEngine`: FastAPI and uvicorn, a model of an embedding.

Install with `pip install 'kvpager[serve]'`; `kvpager serve` runs it.
"""

from kvpager.server.app import create_app, create_operator_app
from kvpager.server.settings import ServerSettings
from kvpager.server.tenants import TenantTable, hash_key, new_key, read_tenants

__all__ = [
    "ServerSettings",
    "TenantTable",
    "create_app",
    "create_operator_app",
    "hash_key",
    "new_key",
    "read_tenants",
]
