"""Suites of tests that a third party can run on parts of its own."""

from det_core.testing._backends import BackendCase, BackendSuite
from det_core.testing._engines import EngineSuite
from det_core.testing._searches import SearchSuite

__all__ = ["BackendCase", "BackendSuite", "EngineSuite", "SearchSuite"]
