"""Tests of orch; the folder says how a test runs (unit, dist, e2e, benchmark)."""
