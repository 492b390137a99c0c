"""Slow proofs draw what the short ones have fixed, and print it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("long", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("long")
