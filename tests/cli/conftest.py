"""A small trained run with its data, as the service's tests have it."""

from tests.app.conftest import pairs, run

__all__ = ["pairs", "run"]
