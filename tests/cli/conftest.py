"""A small trained run with its data, as the service's tests have it."""

from tests.app.conftest import cache, pairs, run

__all__ = ["cache", "pairs", "run"]
