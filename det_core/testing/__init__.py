"""A suite of tests for a search method of your own."""

from det_core.testing._searches import SearchSuite

__all__ = ["SearchSuite"]
