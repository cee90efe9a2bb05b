"""Whole nodes in one thread: a virtual clock, a network that fails, planes that fail, all from one seed."""
