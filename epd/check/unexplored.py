"""Transitions that real nodes make and no exploration does, each with the reason.

One that is listed here and explored, or that no machine could make, is an error; so is a recorded one that
is neither explored nor listed.
"""

from typing import Final

from epd.check.relation import Transition

UNEXPLORED: Final[dict[Transition, str]] = {
    Transition("group", "Leading", "RankReleased", "Leading", ("Ignored",)): (
        "a consumer may release twice; the model's does it once"
    ),
    Transition("job", "Absent", "Granted", "Absent", ("Ignored",)): (
        "of three requests for a picture: its media fail for one while another's grant is on its way"
    ),
    Transition("request", "Filling", "SourcesReady", "Filling", ("Ignored",)): (
        "of three pictures in a part: a read fails while news that is not the last is on its way"
    ),
    Transition(
        "request",
        "Filling",
        "SessionEnded",
        "Filling",
        ("ChooseEncoder",),
        "Requested->Placing(last_error)",
    ): "of two parts in one session: one is tried for the second time, the other for the first",
    Transition("session", "Absent", "FrameSent(control)", "Absent"): (
        "what was queued when the session ended is framed after it; here a frame is sent as it is built"
    ),
    Transition("session", "Absent", "HelloReceived(room)", "Absent", ("SendRejected",)): (
        "the model's nodes fit each other: they have the same versions, fingerprint and data plane"
    ),
    Transition("session", "Absent", "HelloReceived(room, draining)", "Absent", ("SendRejected",)): (
        "the model's encoder drains within its sessions; who dials it then is told as one who finds no room"
    ),
}
"""Of machines that are explored."""

_MACHINES: Final = {
    "push": "push windows are not explored: the test of their machine feeds it whatever comes",
}


def reason_of(transition: Transition) -> str | None:
    """Why it is not explored; None if it is not listed."""
    return _MACHINES.get(transition.machine) or UNEXPLORED.get(transition)
