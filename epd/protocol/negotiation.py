"""Whether two nodes can have a session: versions, roles, data planes, model fingerprints."""

from typing import Final

from epd.protocol.errors import SessionRejected, WrongRole
from epd.protocol.messages import Hello, Rejected, Welcome

OLDEST_LOGIC_VERSION: Final = 1
"""Of a peer that our machines work with; raised with a change that they cannot live beside."""


def check_hello(ours: Hello, theirs: Hello | Welcome) -> Rejected | None:
    """Whether the two nodes can have a session: None, or why not, with both sides' values.

    Protocol versions must be equal. Of two logic versions the newer program decides: nodes are upgraded
    one by one, so it works with those from `OLDEST_LOGIC_VERSION` on and refuses older ones. Fingerprint,
    data plane and segment of a client are empty and not compared; an empty fingerprint of a prefill node
    takes any encoder's (it announces that one from then on).
    """
    if ours.protocol_version != theirs.protocol_version:
        return _differ("protocol versions", ours, ours.protocol_version, theirs, theirs.protocol_version)
    if theirs.logic_version < OLDEST_LOGIC_VERSION:
        return _differ("logic versions", ours, ours.logic_version, theirs, theirs.logic_version)
    roles = {ours.role, theirs.role}
    if len(roles) == 1:
        reason = f"{ours.node} and {theirs.node} are both {ours.role} nodes"
        return Rejected(WrongRole.code, reason)
    if "client" in roles:
        return None
    plane, their_plane = _family(ours.data_plane), _family(theirs.data_plane)
    if plane != their_plane:
        return _differ("data planes", ours, ours.data_plane, theirs, theirs.data_plane)
    if ours.fingerprint != theirs.fingerprint and not _takes_any(ours) and not _takes_any(theirs):
        return _differ("model fingerprints", ours, ours.fingerprint, theirs, theirs.fingerprint)
    return None


def _family(data_plane: str) -> str:
    """`mooncake` of `mooncake/tcp`: which transport carries the bytes is Mooncake's own choice."""
    return data_plane.partition("/")[0]


def _takes_any(hello: Hello | Welcome) -> bool:
    return hello.role == "prefill" and not hello.fingerprint


def _differ(what: str, ours: Hello, our: object, theirs: Hello | Welcome, their: object) -> Rejected:
    reason = f"{what} differ: {ours.node} has {our!r}, {theirs.node} has {their!r}"
    return Rejected(SessionRejected.code, reason)
