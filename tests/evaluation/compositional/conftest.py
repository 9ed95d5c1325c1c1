"""A small model that reads pictures: NAAF on drawn scenes, trained for a moment."""

from tests.app.conftest import pairs, run

__all__ = ["pairs", "run"]
