"""The checker's nodes as the invariants see them."""

from epd.check.encoder_node import EncoderState
from epd.check.invariants import (
    AnnouncedView,
    DeliveryView,
    EncoderView,
    LeaseView,
    PrefillView,
    SourceView,
    WriteView,
)
from epd.check.prefill_node import PrefillState, expected
from epd.check.setup import JUNK, SEAL, Setup, content
from epd.protocol import encoder, jobs, prefill_types, reads, sources


def prefill_view(setup: Setup, state: PrefillState) -> PrefillView:
    leases = {entry.lease: entry for entry in state.leases}
    deliveries = []
    for transfer, lease in state.held:
        entry = leases.get(lease)
        places = entry.slots if entry is not None else ()
        found = tuple(state.memory[slot] for slot in places)
        whole = entry is None or found == expected(setup, transfer)
        deliveries.append(DeliveryView(f"r{transfer}", lease, places, whole))
    writes = [
        WriteView(read.read, read.lease, read.slot)
        for read in state.reads
        if not isinstance(read.machine, reads.Idle | reads.Sealing)
    ]
    attempts = [
        part.session
        for _, request in state.requests
        for part in getattr(request, "parts", ())
        if isinstance(part, prefill_types.Requested | prefill_types.Sized | prefill_types.Granted)
    ]
    held = (
        *(f"request r{transfer}" for transfer, _ in state.requests),
        *(f"lease {entry.lease}" for entry in state.leases),
        *(f"slot machine {lease}" for lease, _ in state.slots),
        *(f"read {read.read}" for read in state.reads),
        *(f"wish for room of r{entry[0]}" for entry in state.waiting),
        *(f"mail of {actor}" for actor, _ in state.mail),
    )
    return PrefillView(
        setup.pool_slots,
        tuple(LeaseView(entry.lease, entry.slots) for entry in state.leases),
        tuple(writes),
        tuple(deliveries),
        tuple((f"r{number}", words) for number, words in enumerate(state.told)),
        tuple(f"r{transfer}" for transfer, _, slots in state.waiting if slots),
        state.sessions,
        tuple(attempts),
        state.flaws,
        held,
    )


def encoder_view(setup: Setup, state: EncoderState) -> EncoderView:
    places = {entry.staged: entry for entry in state.staged}
    machines = dict(state.sources)
    forwards = [(staged, places[staged].slot if staged in places else 0) for _, staged in state.queue]
    if state.running is not None:
        forwards.append((state.running.staged, state.running.slot))
    ungranted = [
        kind
        for kind, job in state.jobs
        if isinstance(job, jobs.Queued) and not job.withdrawn and not any(w.granted for w in job.wishes)
    ]
    kinds = dict(state.kinds)
    announced = []
    for key, part in state.parts:
        for number, item in enumerate(part.items):
            if not isinstance(item, encoder.Announced):
                continue
            source, entry = machines.get(item.staged), places.get(item.staged)
            pins = source.pins if isinstance(source, sources.Stable) else ()
            pinned = any((p.session, p.transfer, p.part, p.item) == (*key[:3], number) for p in pins)
            intact = False
            if pinned and entry is not None and isinstance(source, sources.Stable):
                rows = setup.rows[kinds[key, number]]
                cells = (*(content(kinds[key, number], row) for row in range(rows)), SEAL + source.seal)
                intact = state.memory[entry.slot][: rows + 1] == cells
            announced.append(AnnouncedView(key, number, item.staged, pinned, intact))
    held = (
        *(f"part {key}" for key, _ in state.parts),
        *(f"job {kind}" for kind, _ in state.jobs),
        *(f"source {staged}" for staged, _ in state.sources),
        *(f"staging slot {entry.slot}" for entry in state.staged),
        *(f"media {kind}" for kind in (*state.media, *(kind for kind, _ in state.fetching))),
        *(f"wish for staging of job {kind}" for kind in state.waiting),
        *(f"queued forward {kind}" for kind, _ in state.queue),
        *(["forward"] if state.running is not None else []),
        *(f"kind of {entry}" for entry, _ in state.kinds),
        *(f"mail of {actor}" for actor, _ in state.mail),
    )
    return EncoderView(
        tuple(
            SourceView(entry.staged, entry.slot, isinstance(machines.get(entry.staged), sources.Writing))
            for entry in state.staged
        ),
        tuple(forwards),
        tuple(announced),
        tuple(key[:3] for key, _ in state.parts),
        tuple(ungranted),
        state.sessions,
        state.flaws,
        held,
    )


def seals_of_encoder(state: EncoderState) -> set[int]:
    """Every seal that something in this node names."""
    seals = {cell - SEAL for cells in state.memory for cell in cells if cell > SEAL}
    for _, source in state.sources:
        seals |= {source.seal, source.next_seal}
    for _, words in state.mail:
        for word in words:
            if isinstance(word, encoder.SourcePinned):
                seals.add(word.source.seal)
    return seals


def seals_of_prefill(state: PrefillState) -> set[int]:
    seals: set[int] = {read.source.seal for read in state.reads}
    for _, slot in state.slots:
        for running in slot.reads:
            seals |= {w.source.seal for w in (running.wanted, running.next) if w is not None}
    for _, words in state.mail:
        for word in words:
            source = getattr(word, "source", None)
            if source is not None:
                seals.add(source.seal)
    return seals


assert JUNK < SEAL
