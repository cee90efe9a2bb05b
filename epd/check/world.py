"""The product of the nodes and the wires between them: its states, and what can happen in each.

A state of the world is a tuple of small numbers: nodes and messages are interned, and what an input makes of
a node is computed once. Numbers that are drawn (seals, staged results, leases, reads) are taken as the
smallest that nothing names any more, so states that differ only in them are one; requests that are alike are
submitted in order, and alike slots are taken lowest first.

Two channels. The *ordered* one is what the session machines make of a connection (`session_world.py`
explores those): in order, once, until the session ends; then each side learns of it in its own time, after
any prefix of what was on its way, and the prefill node dials again. The *hostile* one also drops, repeats
and reorders.
"""

from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from epd.check.encoder_node import EncoderNode, EncoderState
from epd.check.faults import HOSTILE
from epd.check.invariants import View, Violation, first_violation, i4_no_residue
from epd.check.machines import Machines, Patch, shipped
from epd.check.moves import Move, encoder_moves, prefill_moves
from epd.check.node import Words
from epd.check.prefill_node import ENCODERS, PrefillNode, PrefillState
from epd.check.setup import SEAL, Setup, rows_of, seals_in
from epd.check.views import encoder_view, prefill_view, seals_of_encoder, seals_of_prefill
from epd.protocol import messages as m

NOT_YET: Final = 0
OPEN: Final = 1
OVER: Final = 2


class Wire(NamedTuple):
    """One session: how each side sees it, whether the connection is cut, and what is on its way."""

    session: int
    prefill: int
    encoder: int
    cut: bool = False
    up: tuple[int, ...] = ()
    down: tuple[int, ...] = ()
    media: tuple[int, ...] = ()


class State(NamedTuple):
    prefill: int
    encoders: tuple[int, ...]
    wires: tuple[Wire, ...]
    submitted: int
    """Requests 0 to `submitted` - 1 were."""
    made: int
    """Sessions."""
    faults: int
    """How many may still happen."""


class Interned:
    """Values and their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def number(self, value: Hashable) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class World:
    """`patches` wraps machines' steps by name: how a bug is seeded."""

    def __init__(self, setup: Setup, patches: Mapping[str, Patch] | None = None) -> None:
        self.setup = setup
        self.kinds = shipped(setup.attempts)
        self.machines = Machines(self.kinds, patches or {})
        self._prefills, self._encoders, self._messages = Interned(), Interned(), Interned()
        self.longest_queue = 0
        self._next_prefill = cache(self._compute_prefill)
        self._next_encoder = cache(self._compute_encoder)
        self._seal_mask = cache(self._compute_seal_mask)
        self._prefill_moves = cache(lambda number: prefill_moves(setup, self._prefills.values[number]))
        self._encoder_moves = cache(lambda number: encoder_moves(setup, self._encoders.values[number]))
        self._violation = cache(self._compute_violation)
        self._held = cache(self._compute_held)

    # -- states ------------------------------------------------------------------------------

    def initial(self) -> State:
        """Every encoder's session is open, nothing was submitted."""
        sessions = tuple(ENCODERS * (number + 1) + number for number in range(self.setup.encoders))
        prefill = PrefillState(sessions=sessions, peers=sessions)
        encoders = tuple(EncoderState(sessions=(session,)) for session in sessions)
        return State(
            self._prefills.number(PrefillNode(self.setup, self.machines, prefill).frozen()),
            tuple(
                self._encoders.number(EncoderNode(self.setup, self.machines, state, ()).frozen())
                for state in encoders
            ),
            tuple(Wire(session, OPEN, OPEN) for session in sessions),
            0,
            len(sessions),
            self.setup.faults,
        )

    def violation(self, state: State) -> Violation | None:
        found = self._violation("prefill", state.prefill)
        for number in state.encoders:
            found = found or self._violation("encoder", number)
        return found

    def _compute_violation(self, kind: str, number: int) -> Violation | None:
        if kind == "prefill":
            return first_violation(View(prefills=(prefill_view(self.setup, self._prefills.values[number]),)))
        return first_violation(View(encoders=(encoder_view(self.setup, self._encoders.values[number]),)))

    def residue(self, state: State) -> Violation | None:
        """What a state in which nothing can happen any more still holds, or has not answered."""
        for kind, number in (("prefill", state.prefill), *(("encoder", n) for n in state.encoders)):
            if (found := self._held(kind, number)) is not None:
                return found
        told = self._prefills.values[state.prefill].told
        for transfer in range(state.submitted):
            if len(told[transfer]) != 1:
                return Violation("I3", f"r{transfer} has ended without a word")
        return None

    def _compute_held(self, kind: str, number: int) -> Violation | None:
        if kind == "prefill":
            return i4_no_residue(View(prefills=(prefill_view(self.setup, self._prefills.values[number]),)))
        return i4_no_residue(View(encoders=(encoder_view(self.setup, self._encoders.values[number]),)))

    def told(self, state: State) -> tuple[tuple[str, ...], ...]:
        """Per request, what its consumer was told."""
        told: tuple[tuple[str, ...], ...] = self._prefills.values[state.prefill].told
        return told

    def held(self, state: State) -> tuple[str, ...]:
        """Everything that is held, by name."""
        held = prefill_view(self.setup, self._prefills.values[state.prefill]).held
        for index, number in enumerate(state.encoders):
            view = encoder_view(self.setup, self._encoders.values[number])
            held += tuple(f"e{index} {name}" for name in view.held)
        return held

    def apply_logged(self, state: State, move: Move) -> State:
        """As `apply`, but computed again, so that `machines.log` has its steps."""
        self._next_prefill.cache_clear()
        self._next_encoder.cache_clear()
        return self.apply(state, move)

    # -- what can happen ---------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[Move]:
        """Everything that can happen now; what costs more faults than are left cannot."""
        faults = state.faults
        yield from (move for move in self.resting_moves(state) if move.cost <= faults)
        if state.submitted < len(self.setup.requests):
            yield Move(0, None, ("submit", state.submitted))
        if not faults:
            return
        kinds = self.setup.kinds
        if "crash" in kinds:
            for index in range(len(state.encoders)):
                yield Move(1, None, ("crash", index))
        if "crash-prefill" in kinds and state.submitted:
            yield Move(1, None, ("crash-prefill",))

    def resting_moves(self, state: State) -> Iterator[Move]:
        """Among others, everything that happens when nothing more goes wrong and time goes on."""
        for move in self._prefill_moves(state.prefill):
            yield move
        for index, number in enumerate(state.encoders):
            for move in self._encoder_moves(number):
                yield move._replace(words=(move.words[0], index, *move.words[1:]))
        yield from self._wire_moves(state)

    def _wire_moves(self, state: State) -> Iterator[Move]:
        dialled = {wire.session % ENCODERS for wire in state.wires if wire.prefill != OVER}
        for wire in state.wires:
            yield from self._arrivals(wire)
            if state.faults:
                yield from self._wire_faults(wire)
            if wire.encoder == NOT_YET:
                yield Move(0, 0, ("hello", wire.session))
            elif wire.prefill == NOT_YET and not wire.cut:
                yield Move(0, 0, ("welcome", wire.session))
            if wire.cut and wire.prefill != OVER:
                yield Move(0, 1, ("lost", "prefill", wire.session))
            if wire.cut and wire.encoder != OVER:
                yield Move(0, 1, ("lost", "encoder", wire.session))
        for index in range(self.setup.encoders):
            if index not in dialled:
                yield Move(0, 2, ("dial", index))

    def _arrivals(self, wire: Wire) -> Iterator[Move]:
        hostile, session = self.setup.hostile, wire.session
        deaf = NOT_YET if "any session" in self.setup.broken else OVER
        if wire.encoder not in {NOT_YET, deaf}:
            for index in range(len(wire.up) if hostile else min(1, len(wire.up))):
                yield Move(0, 0, ("up", session, index))
            for index in range(len(wire.media)):
                yield Move(0, 0, ("media", session, index))
        if wire.prefill not in {NOT_YET, deaf}:
            for index in range(len(wire.down) if hostile else min(1, len(wire.down))):
                yield Move(0, 0, ("down", session, index))

    def _wire_faults(self, wire: Wire) -> Iterator[Move]:
        kinds, session = self.setup.kinds, wire.session
        if not wire.cut and "cut" in kinds:
            yield Move(1, None, ("cut", session))
        if not self.setup.hostile:
            return
        for lane, queue in (("up", wire.up), ("down", wire.down), ("media", wire.media)):
            for index in range(len(queue)):
                for fault in sorted(kinds & HOSTILE):
                    yield Move(1, None, (fault, lane, session, index))

    # -- what follows ------------------------------------------------------------------------

    def apply(self, state: State, move: Move) -> State:
        words = move.words
        if move.cost:
            state = state._replace(faults=state.faults - move.cost)
        match words[0]:
            case "up" | "down" | "media" | "drop" | "repeat":
                return self._apply_message(state, words)
            case "hello" | "welcome" | "cut" | "lost" | "dial" | "crash" | "crash-prefill":
                return self._apply_session(state, words)
            case "piece" if words[3] == "done":
                cell, seal = self._source_cell(state, words[1], words[2])
                return self._to_prefill(state, (*words, cell, seal))
            case "piece":
                return self._to_prefill(state, (*words, 0, 0))
            case "seal":
                return self._to_prefill(state, ("seal", words[1], self._source_cell(state, words[1], -1)[1]))
            case "seal-fails":
                return self._to_prefill(state, ("seal", words[1], 0))
            case "submit":
                return self._to_prefill(state, words)._replace(submitted=words[1] + 1)
            case (
                "encoder-turn"
                | "start"
                | "write"
                | "finish"
                | "stick-forward"
                | "evict"
                | "drain"
                | ("bad-media" | "part-deadline" | "job-timeout")
            ):
                return self._to_encoder(state, words[1], (_ENCODER_INPUTS[words[0]], *words[2:]))
            case "prefill-turn":
                return self._to_prefill(state, ("turn", *words[1:]))
            case _:
                return self._to_prefill(state, words)

    def _source_cell(self, state: State, read: int, row: int) -> tuple[int, int]:
        """What stands in the encoder's memory where this read reads: a row, and the seal behind the rows."""
        entry = next(e for e in self._prefills.values[state.prefill].reads if e.read == read)
        node: EncoderState = self._encoders.values[state.encoders[entry.session % ENCODERS]]
        cells = node.memory[entry.source.offset]
        word = cells[rows_of(entry.source)]
        return cells[row], max(0, word - SEAL)

    def _to_prefill(self, state: State, words: Words) -> State:
        number, sent = self._next_prefill(state.prefill, words)
        return self._send(state._replace(prefill=number), sent, from_prefill=True)

    def _to_encoder(self, state: State, index: int, words: Words) -> State:
        fresh = self._fresh_seals(state, index)
        number, sent = self._next_encoder(state.encoders[index], words, fresh)
        encoders = (*state.encoders[:index], number, *state.encoders[index + 1 :])
        return self._send(state._replace(encoders=encoders), sent, from_prefill=False)

    def _compute_prefill(self, number: int, words: Words) -> tuple[int, tuple[tuple[int, int], ...]]:
        node = PrefillNode(self.setup, self.machines, self._prefills.values[number])
        state, sent = node.react(self._with_message(words))
        return self._prefills.number(state), tuple((to, self._messages.number(what)) for to, what in sent)

    def _compute_encoder(
        self, number: int, words: Words, fresh: tuple[int, ...]
    ) -> tuple[int, tuple[tuple[int, int], ...]]:
        node = EncoderNode(self.setup, self.machines, self._encoders.values[number], fresh)
        state, sent = node.react(self._with_message(words))
        return self._encoders.number(state), tuple((to, self._messages.number(what)) for to, what in sent)

    def _with_message(self, words: Words) -> Words:
        return (*words[:2], self._messages.values[words[2]]) if words[0] == "message" else words

    def message(self, number: int) -> Any:
        return self._messages.values[number]

    def _fresh_seals(self, state: State, index: int) -> tuple[int, ...]:
        if "repeat a seal" in self.setup.broken:
            return (1, 2) * 4
        named = self._seal_mask("prefill", state.prefill)
        for number in state.encoders:
            named |= self._seal_mask("encoder", number)
        for wire in state.wires:
            for message in wire.down:
                named |= self._seal_mask("message", message)
        fresh: list[int] = []
        seal = 1
        while len(fresh) < 2 * self.setup.staging_slots + 2:
            if not named >> seal & 1:
                fresh.append(seal)
            seal += 1
        return tuple(fresh)

    def _compute_seal_mask(self, kind: str, number: int) -> int:
        if kind == "prefill":
            seals = seals_of_prefill(self._prefills.values[number])
        elif kind == "encoder":
            seals = seals_of_encoder(self._encoders.values[number])
        else:
            message = self._messages.values[number]
            seals = set(seals_in(message.items)) if isinstance(message, m.ForwardDone) else set()
        return sum(1 << seal for seal in seals)

    def _send(self, state: State, sent: tuple[tuple[int, int], ...], *, from_prefill: bool) -> State:
        for session, message in sent:
            for index, wire in enumerate(state.wires):
                if wire.session != session or wire.cut:
                    continue
                if from_prefill:
                    lane = "media" if isinstance(self._messages.values[message], m.NeedMedia) else "up"
                    blocked = wire.encoder == OVER
                else:
                    lane, blocked = "down", wire.prefill == OVER
                if not blocked:
                    queue = (*getattr(wire, lane), message)
                    self.longest_queue = max(self.longest_queue, len(queue))
                    state = _with_wire(state, index, _queued(wire, lane, queue))
        return state

    # -- messages and sessions ---------------------------------------------------------------

    def _apply_message(self, state: State, words: Words) -> State:
        fault = words[0] in {"drop", "repeat"}
        lane, session, index = words[1:] if fault else words
        number, wire = _find(state, session)
        queue = getattr(wire, lane)
        message = queue[index]
        rest = (*queue[:index], *queue[index + 1 :])
        if words[0] == "repeat":
            rest = (*queue, message)
            self.longest_queue = max(self.longest_queue, len(rest))
        state = _with_wire(state, number, _queued(wire, lane, rest))
        if fault:
            return state
        if lane == "down":
            return self._to_prefill(state, ("message", session, message))
        return self._to_encoder(state, session % ENCODERS, ("message", session, message))

    def _apply_session(self, state: State, words: Words) -> State:
        match words:
            case ("dial", index):
                session = ENCODERS * (state.made + 1) + index
                wires = (*state.wires, Wire(session, NOT_YET, NOT_YET))
                return state._replace(wires=wires, made=state.made + 1)
            case ("hello", session):
                for number, wire in enumerate(state.wires):
                    if wire.session % ENCODERS == session % ENCODERS and wire.encoder == OPEN:
                        over = wire._replace(encoder=OVER, cut=True, up=(), media=())
                        state = _with_wire(state, number, over)
                number, wire = _find(state, session)
                state = _with_wire(state, number, wire._replace(encoder=OPEN))
                return _tidy(self._to_encoder(state, session % ENCODERS, ("up", session)))
            case ("welcome", session):
                number, wire = _find(state, session)
                state = _with_wire(state, number, wire._replace(prefill=OPEN))
                return self._to_prefill(state, ("up", session))
            case ("cut", session):
                number, wire = _find(state, session)
                return _with_wire(state, number, wire._replace(cut=True))
            case ("lost", "prefill", session):
                number, wire = _find(state, session)
                keep = wire.down if "any session" in self.setup.broken else ()
                state = _with_wire(state, number, wire._replace(prefill=OVER, down=keep))
                return _tidy(self._to_prefill(state, ("down", session)))
            case ("lost", "encoder", session):
                number, wire = _find(state, session)
                state = _with_wire(state, number, wire._replace(encoder=OVER, up=(), media=()))
                return _tidy(self._to_encoder(state, session % ENCODERS, ("down", session)))
            case ("crash", index):
                fresh = EncoderNode(self.setup, self.machines, EncoderState(), ()).frozen()
                encoders = list(state.encoders)
                encoders[index] = self._encoders.number(fresh)
                wires = tuple(
                    w._replace(encoder=OVER, cut=True, up=(), media=())
                    if w.session % ENCODERS == index
                    else w
                    for w in state.wires
                )
                return _tidy(state._replace(encoders=tuple(encoders), wires=wires))
            case _:  # the prefill node crashes, and its requests with it: they are submitted anew
                fresh_prefill = PrefillNode(self.setup, self.machines, PrefillState()).frozen()
                wires = tuple(w._replace(prefill=OVER, cut=True, down=()) for w in state.wires)
                prefill = self._prefills.number(fresh_prefill)
                return _tidy(state._replace(prefill=prefill, wires=wires, submitted=0))


_ENCODER_INPUTS: Final = {
    "encoder-turn": "turn",
    "start": "start",
    "write": "write",
    "finish": "finish",
    "stick-forward": "stick",
    "evict": "evict",
    "drain": "drain",
    "bad-media": "bad-media",
    "part-deadline": "deadline",
    "job-timeout": "job-timeout",
}


def _find(state: State, session: int) -> tuple[int, Wire]:
    return next((index, wire) for index, wire in enumerate(state.wires) if wire.session == session)


def _queued(wire: Wire, lane: str, queue: tuple[int, ...]) -> Wire:
    changed: dict[str, Any] = {lane: queue}
    return wire._replace(**changed)


def _with_wire(state: State, index: int, wire: Wire) -> State:
    return state._replace(wires=(*state.wires[:index], wire, *state.wires[index + 1 :]))


def _tidy(state: State) -> State:
    """Forget the wires that both sides have."""
    kept = tuple(w for w in state.wires if w.prefill != OVER or w.encoder != OVER or w.down)
    return state if len(kept) == len(state.wires) else state._replace(wires=kept)
