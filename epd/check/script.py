"""Scripts: a run of the checked world as text, to be read, saved under `tests/scripts/` and run again.

    # What is proved, and where the case comes from: comments, kept as they are.
    world requests=0 pool_slots=1
    submit r0
    > request 0: New->Negotiating on Submitted  SendEncodeRequest
    up s4
    > part 4.0.0: Idle->Open on RequestReceived  SendMetadata  Subscribe
    > job 0: Absent->Unstarted on Subscribed
    settle
    > ...
    held
    > nothing

The first command is `world` with the shape of `Setup` (whatever is left out has its default). Every other
command is one move, or `settle`, `until`, `held`, `end`; lines that begin with `> ` are what came of it: a
line per machine step, `! I1: ...` for a violated invariant. `run` ignores the `>` lines that it is given and
writes new ones; a script is right if it comes out as it went in.

`world` knows `requests=0,1+0@1/0@0` (requests by comma, parts by slash, kinds of pictures by plus, the
encoder after @), `rows=2,3` (rows of each kind), `encoders`, `staging_slots`, `staging_rows`, `pool_slots`,
`attempts`, `mailboxes=prefill|encoder|both`, and `hostile=yes`.

| command | what happens |
|---|---|
| `submit r0` | the next request is submitted |
| `up s4 [0]`, `media s4 [0]` | a message from the prefill node arrives (the number says which: from 0) |
| `down s4 [0]` | one from the encoder arrives |
| `drop up s4 0`, `repeat up s4 0` | it is lost; it will come once more |
| `cut s4`, `lost prefill s4`, `lost encoder s4` | the connection is gone; a side learns of it |
| `dial e0`, `hello s8`, `welcome s8` | a new session is dialled, reaches the encoder, is in force |
| `crash e0`, `crash-prefill` | a node is killed and started again |
| `post 65` | the poller takes up a read |
| `piece 65 0 done`, `piece 65 0 failed` | a piece of a read lands, or ends without having landed |
| `seal 65`, `seal-fails 65` | the seal is read after the pieces; that read fails |
| `stick 65` | the read does not go on until it is aborted |
| `read-timeout 1 52` | the deadline (second 52) of a read into lease 1 passes |
| `timeout r0 pause` | so does the request's: `pause`, `metadata`, `room`, `warning` or `deadline` |
| `take r0`, `release r0`, `cancel r0` | the consumer |
| `start e0`, `write e0`, `finish e0 ok` | the worker starts, writes a row, ends (`ok`, `failed`, `died`) |
| `stick-forward e0` | the forward does not go on until its worker is killed |
| `evict e0 1`, `drain e0` | result 1 is given up; the node drains |
| `bad-media e0 s4 0` | the media of kind 0 that arrive are not those announced |
| `job-timeout e0 0` | a job's deadline passes |
| `part-deadline e0 s4 0 0` | that of part 0 of transfer 0 does, at the encoder |
| `prefill-turn buffers`, `encoder-turn e0 dedup` | with `mailboxes`: an actor takes its next message |
| `settle` | one fair run without faults until nothing can happen (a `>` line per move, then its steps) |
| `until TEXT` | as `settle`, until a move or a step has `TEXT`; only that move is shown |
| `held` | everything that is held, or `nothing` |
| `end` | as `settle`, unseen; then what each request's consumer was told, and what is held |

`world group requests=0` is a rank group of two (`group_world.py`): `join 1`, `submit r0`, `answer 0`,
`ready 0` (the encoder), `entry 1` and `word 1` (the next entry arrives at rank 1, a word of it at rank 0),
`read-ends 1 2 ok`, `read-timeout 1 1 52`, `release-rank 1 0`, `cut`, `lose-rank 1`, `timeout`, `cancel`.
`world sessions attempts=2` are the two sides of a connection (`session_world.py`; side 0 dials): `dial`,
`frame 0` and `drop-frame`, `repeat-frame`, `garble-frame` (by place), `send 0 1`, `media-up 1`,
`lost-lane 0 1 0`, `close 0 1`, `probe 1 0`, `beat 0 1`, `session-timeout 0 1 10` (side, session, second),
`silence 0 1` (its heartbeat was sent a moment before).

`s4` is session 4, of encoder 4 % 4; `e0` an encoder; `r0` a request. Errors are `ScriptError`, with the line.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from epd.check.explorer import Explorable, settle_path
from epd.check.faults import ALL
from epd.check.group_world import GroupWorld
from epd.check.machines import Machines, Patch
from epd.check.moves import Move
from epd.check.session_world import SessionWorld
from epd.check.setup import Part, Setup
from epd.check.world import World
from epd.protocol.errors import EpdError


class Playable(Explorable, Protocol):
    """What a script needs of a world."""

    machines: Machines
    longest_queue: int
    """The most messages that ever were on their way on one channel."""

    def apply_logged(self, state: Any, move: Move) -> Any: ...
    def held(self, state: Any) -> tuple[str, ...]: ...
    def told(self, state: Any) -> tuple[tuple[str, ...], ...]: ...


WORLDS: Final[dict[str, Callable[[Setup, Mapping[str, Patch] | None], Playable]]] = {
    "nodes": World,
    "group": GroupWorld,
    "sessions": SessionWorld,
}
"""By the word behind `world`; `nodes` goes without saying."""

_SIGNATURES: Final = {
    "submit": "r",
    "up": "s#",
    "down": "s#",
    "media": "s#",
    "drop": "-s-",
    "repeat": "-s-",
    "cut": "s",
    "lost": "-s",
    "dial": "e",
    "hello": "s",
    "welcome": "s",
    "crash": "e",
    "timeout": "r-",
    "take": "r",
    "release": "r",
    "cancel": "r",
    "start": "e",
    "write": "e",
    "finish": "e-",
    "stick-forward": "e",
    "evict": "e-",
    "drain": "e",
    "bad-media": "es-",
    "job-timeout": "e-",
    "part-deadline": "es--",
    "encoder-turn": "e-",
}
"""How arguments are written: r0, s4, e0, plain, or left out if 0 (#)."""
_NAME: Final = re.compile(r"[rse]?(\d+)")


class ScriptError(EpdError):
    """A script that cannot be read, or asks for what cannot happen; `message` names the line."""

    code = "script"


def render_setup(setup: Setup, world: str = "nodes") -> str:
    """The `world` command."""
    requests = ",".join(
        "/".join(
            "+".join(map(str, part.kinds)) + (f"@{part.encoder}" if part.encoder else "") for part in parts
        )
        for parts in setup.requests
    )
    words = ["world"] if world == "nodes" else ["world", world]
    words += [f"requests={requests}"] if requests else []
    default = Setup((), frozenset(), 0)
    if setup.rows != default.rows:
        words.append("rows=" + ",".join(map(str, setup.rows)))
    words += [
        f"{name}={getattr(setup, name)}"
        for name in ("encoders", "staging_slots", "staging_rows", "pool_slots", "attempts", "mailboxes")
        if getattr(setup, name) != getattr(default, name)
    ]
    if setup.hostile:
        words.append("hostile=yes")
    return " ".join(words)


def parse_world(line: str, patches: Mapping[str, Patch] | None = None) -> Playable:
    """The world that a `world` command asks for; nothing bounds its faults."""
    setup = Setup((), ALL, 10**6)
    kind = "nodes"
    for word in line.split()[1:]:
        if word in WORLDS:
            kind = word
            continue
        name, _, value = word.partition("=")
        try:
            setup = setup._replace(**{name: _parse_value(name, value)})
        except ValueError:
            raise ScriptError(
                f"{line!r}: {value!r} is no value of {name!r}, or there is no such setting"
            ) from None
    if not setup.requests and kind != "sessions":
        raise ScriptError(f"{line!r}: says no requests=")
    return WORLDS[kind](setup, patches)


def _parse_value(name: str, value: str) -> Any:
    if name == "requests":
        return tuple(map(_parse_request, value.split(",")))
    if name == "rows":
        return tuple(map(int, value.split(",")))
    if name in {"encoders", "staging_slots", "staging_rows", "pool_slots", "attempts"}:
        return int(value)
    if name == "mailboxes" and value in {"prefill", "encoder", "both"}:
        return value
    if name == "hostile" and value == "yes":
        return True
    raise ValueError


def _parse_request(text: str) -> tuple[Part, ...]:
    parts = []
    for part in text.split("/"):
        kinds, _, encoder = part.partition("@")
        parts.append(Part(tuple(map(int, kinds.split("+"))), int(encoder or 0)))
    return tuple(parts)


def render_move(words: Sequence[Any]) -> str:
    """A move as a command."""
    signature = _SIGNATURES.get(words[0], "")
    shown = [str(words[0])]
    for position, word in enumerate(words[1:]):
        how = signature[position] if position < len(signature) else "-"
        if how == "#":
            shown += [str(word)] if word else []
        else:
            shown.append(str(word) if how == "-" else f"{how}{word}")
    return " ".join(shown)


def parse_move(line: str) -> tuple[Any, ...]:
    """The words of a command."""
    name, *rest = line.split()
    words: list[Any] = [name]
    for word in rest:
        match = _NAME.fullmatch(word)
        words.append(int(match[1]) if match else word)
    signature = _SIGNATURES.get(name, "")
    if signature.endswith("#") and len(words) == len(signature):
        words.append(0)
    return tuple(words)


def run(lines: Iterable[str], patches: Mapping[str, Patch] | None = None) -> Iterator[str]:
    """The script with the outcome that it has now, of the machines as shipped, unless patched.

    Raises `ScriptError`."""
    player: _Player | None = None
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\n")
        if text.startswith(">"):
            continue
        yield text
        command = text.partition("#")[0].strip()
        if not command:
            continue
        try:
            if command.split()[0] == "world":
                player = _Player(parse_world(command, patches))
            elif player is None:
                raise ScriptError(f"{command!r} before `world`")
            else:
                yield from player.play(command)
        except ScriptError as error:
            raise ScriptError(f"line {number}: {error.message}") from None


def script_of(
    setup: Setup, trace: Sequence[Move], *, world: str = "nodes", patches: Mapping[str, Patch] | None = None
) -> list[str]:
    """A script that makes these moves, with their outcome: of the machines as shipped, unless patched."""
    player = _Player(WORLDS[world](setup._replace(kinds=ALL, faults=10**6), patches))
    lines = [render_setup(setup, world)]
    for move in trace:
        command = render_move(move.words)
        lines.append(command)
        lines.extend(player.play(command))
    return lines


class _Player:
    """Plays commands in one world, and says what came of them."""

    def __init__(self, world: Playable) -> None:
        self._world = world
        world.machines.log = []
        self._state = world.initial()

    def play(self, command: str) -> Iterator[str]:
        if command == "held":
            yield from self._held()
            return
        if command == "end":
            yield from self._end()
            return
        if command.startswith("until "):
            yield from self._until(command.removeprefix("until ").strip())
            return
        if command == "settle":
            for move in settle_path(self._world, self._state):
                yield f"> {render_move(move.words)}"
                yield from self._make(move)
            return
        words = parse_move(command)
        possible = {move.words: move for move in self._world.moves(self._state)}
        if words not in possible:
            able = ", ".join(sorted(map(render_move, possible)))
            raise ScriptError(f"{command!r} cannot happen here; what can: {able}")
        yield from self._make(possible[words])

    def _make(self, move: Move) -> Iterator[str]:
        log = self._world.machines.log
        assert log is not None
        log.clear()
        self._state = self._world.apply_logged(self._state, move)
        yield from (f"> {line}" for line in log)
        violation = self._world.violation(self._state)
        if violation is not None:
            yield f"> ! {violation}"

    def _until(self, text: str) -> Iterator[str]:
        for move in settle_path(self._world, self._state):
            lines = [f"> {render_move(move.words)}", *self._make(move)]
            if any(text in line for line in lines):
                yield from lines
                return
            yield from filter(_is_violation, lines)
        raise ScriptError(f"it came to rest without {text!r}")

    def _end(self) -> Iterator[str]:
        for move in settle_path(self._world, self._state):
            yield from filter(_is_violation, self._make(move))
        for number, words in enumerate(self._world.told(self._state)):
            if words:
                yield f"> r{number}: {', '.join(words)}"
        residue = self._world.residue(self._state)
        if residue is not None:
            yield f"> ! {residue}"
        yield from self._held()

    def _held(self) -> Iterator[str]:
        held = self._world.held(self._state)
        yield from (f"> {line}" for line in held or ("nothing",))


def _is_violation(line: str) -> bool:
    return line.startswith("> ! ")
