"""Chaos: real processes, real faults, and an oracle that knows every byte (`epd chaos`)."""
