"""Distinct types for every identity of the protocol, so that a checker tells them apart."""

from typing import NewType

NodeId = NewType("NodeId", str)
"""`ROLE-HOST-PORT` unless configured; for people, never for decisions."""
Incarnation = NewType("Incarnation", int)
"""Random 64 bits, new at every start of a node."""
SessionId = NewType("SessionId", int)
"""Random 64 bits drawn by the dialling side before it connects; also the routing id."""
TransferId = NewType("TransferId", int)
"""From one counter per prefill incarnation, never reused."""
Part = NewType("Part", int)
"""Index of a part within its transfer."""
Attempt = NewType("Attempt", int)
"""From 1; one attempt of a part is open at a time."""
LeaseId = NewType("LeaseId", int)
"""From one counter per incarnation, never reused. A grant is a lease told to an encoder."""
RegionId = NewType("RegionId", int)
"""Index of a region within its pool."""
ReadId = NewType("ReadId", int)
"""From one counter per incarnation, never reused (Mooncake's own batch ids come again at once)."""
WriteId = NewType("WriteId", int)
"""A write that an encoder is asked for: from one counter per prefill incarnation, ascending in a session."""
Seal = NewType("Seal", int)
"""64 bits, never zero, never repeated."""
