"""Recorded runs against the invariants and the tables: what a node did, whatever a machine makes of it."""
