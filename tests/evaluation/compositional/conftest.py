"""A small model that reads pictures: NAAF on drawn scenes, trained for a moment."""

from tests.app.conftest import cache, pairs, run

__all__ = ["cache", "pairs", "run"]
