"""Benchmarks of the flows stand on the same sites as the flows' tests."""

from tests.flows.conftest import make_site, migrated_database

__all__ = ["make_site", "migrated_database"]
