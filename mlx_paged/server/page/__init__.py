"""A page that shows the pool as it is, block by block."""

from mlx_paged.server.page.routes import router

__all__ = ["router"]
