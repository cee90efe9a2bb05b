"""`epd send`: pictures to a prefill node, embeddings back."""

import asyncio
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import uvloop

from epd.client import NodeClient, Result
from epd.encoders.local import save_embedding
from epd.protocol.errors import (
    ConfigError,
    EpdError,
    PeerUnreachable,
    SessionLost,
    SessionRejected,
    SiblingFailed,
)
from epd.protocol.messages import EmbeddingSpec, ErrorValue, ItemOutcome, WantedDType
from epd.request import ImageItem
from epd.runtime.keys import Security, read_public_key, read_secret_key, security_for


class Sent(NamedTuple):
    """What became of one argument."""

    item: str
    outcome: ItemOutcome | None
    error: ErrorValue | None

    def as_json(self) -> dict[str, Any]:
        spec = self.outcome.spec if self.outcome is not None else None
        error = self.error
        return {
            "item": self.item,
            "ok": error is None,
            "rows": spec.rows if spec else None,
            "dim": spec.dim if spec else None,
            "dtype": spec.dtype if spec else None,
            "nbytes": self.outcome.nbytes if self.outcome else None,
            "sha256": self.outcome.sha256.hex() if self.outcome else None,
            "grid_thw": grid_thw(spec) if spec else None,
            "error": {"code": error.code, "message": error.message} if error else None,
        }


class Options(NamedTuple):
    deadline_s: float
    dtype: WantedDType
    save: Path | None
    security: Security | None


@click.command("send")
@click.option("--to", "address", required=True, metavar="tcp://PREFILL", help="The prefill node's address.")
@click.option("--key", "key_file", metavar="FILE", help="Our secret key (epd keygen), if the node has keys.")
@click.option("--server-key", metavar="KEY|FILE", help="The node's public key, or its file; with --key.")
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Save .safetensors here.")
@click.option("--together", is_flag=True, help="One request for all files: all or none.")
@click.option("--concurrency", type=click.IntRange(1, 4096), default=16, show_default=True)
@click.option(
    "--deadline", type=click.FloatRange(0.001, 86_400), default=60.0, show_default=True, metavar="S"
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: the model's.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=str))
def send_command(
    address: str,
    key_file: str | None,
    server_key: str | None,
    save: Path | None,
    together: bool,
    concurrency: int,
    deadline: float,
    dtype: WantedDType | None,
    as_json: bool,
    images: tuple[str, ...],
) -> int:
    """Send IMAGES to a prefill node, one request per file, and show what came back.

    Exit status: 0 all delivered, 1 some failed, 2 the node cannot be reached.
    """
    options = Options(deadline, dtype or "model", save, _security(address, key_file, server_key))
    groups = [images] if together else [(image,) for image in images]
    if save is not None:
        _make_folder(save)
    try:
        results = uvloop.run(_send_all(address, groups, concurrency, options))
    except (PeerUnreachable, SessionRejected) as error:
        click.echo(f"{error.code}: {error.message}", err=True)
        return 2
    ok = all(result.error is None for result in results)
    if as_json:
        report = {"ok": ok, "requests": len(groups), "results": [result.as_json() for result in results]}
        click.echo(json.dumps(report))
    else:
        _show(results)
    return 0 if ok else 1


def _security(address: str, key_file: str | None, server_key: str | None) -> Security | None:
    """Raises `ConfigError` for a key that cannot be used."""
    if key_file is None and server_key is None:
        return None
    if key_file is None or server_key is None:
        raise ConfigError("--key and --server-key belong together", key="key")
    keys = read_secret_key(key_file, key="--key")
    return security_for(keys, address, read_public_key(server_key, key="--server-key"))


async def _send_all(
    address: str, groups: Sequence[Sequence[str]], concurrency: int, options: Options
) -> list[Sent]:
    """As many requests at a time as `concurrency` says, files opened when it is their turn."""
    results: list[list[Sent]] = [[] for _ in groups]
    async with NodeClient(address, security=options.security) as client:
        turns = iter(enumerate(groups))

        async def work() -> None:
            for index, group in turns:
                results[index] = await _send_group(client, group, options)

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(groups))):
                workers.create_task(work())
    return [sent for group in results for sent in group]


async def _send_group(client: NodeClient, images: Sequence[str], options: Options) -> list[Sent]:
    items, errors = await asyncio.to_thread(_open, images)
    if errors:
        return list(_failed(images, errors))
    try:
        result = await client.submit(
            items, deadline_s=options.deadline_s, dtype=options.dtype, rows=options.save is not None
        )
    except SessionLost as lost:
        return [Sent(image, None, lost.as_value()) for image in images]
    error = result.outcome.error
    if error is not None:
        if error.item is None or not 0 <= error.item < len(images):
            return [Sent(image, None, error) for image in images]
        return list(_failed(images, {error.item: error}))
    if options.save is not None:
        try:
            await asyncio.to_thread(_save, options.save, items, result)
        except OSError as refused:
            unsaved = ConfigError(f"save: {refused.filename}: {refused.strerror}").as_value()
            return [Sent(image, None, unsaved) for image in images]
    return [Sent(image, outcome, None) for image, outcome in zip(images, result.outcome.items, strict=True)]


def _open(images: Sequence[str]) -> tuple[list[ImageItem], dict[int, ErrorValue]]:
    items: list[ImageItem] = []
    errors: dict[int, ErrorValue] = {}
    for index, image in enumerate(images):
        try:
            items.append(ImageItem.from_file(image))
        except EpdError as error:
            errors[index] = error.as_value()
    return items, errors


def _failed(images: Sequence[str], errors: dict[int, ErrorValue]) -> Iterator[Sent]:
    """Each its own error; those to blame for nothing say so."""
    first = min(errors)
    sibling = SiblingFailed(f"{images[first]} of the same request failed: {errors[first].code}").as_value()
    for index, image in enumerate(images):
        yield Sent(image, None, errors.get(index, sibling))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save: {folder}: {error.strerror}", key="save", given=str(folder)) from None
    if find_spec("safetensors") is None:
        raise ConfigError("save: needs safetensors: install the extra `hf`", key="save")


def _save(folder: Path, items: Sequence[ImageItem], result: Result) -> None:
    """One file per item: its name and the start of its hash, so that equal names do not collide."""
    for item, outcome, rows in zip(items, result.outcome.items, result.rows, strict=True):
        name = f"{os.path.basename(item.name)}-{_tag(item)}.safetensors"
        save_embedding(folder / name, outcome.spec, rows)


def _tag(item: ImageItem) -> str:
    """Of the path and the media: one name, one file, whatever was given twice."""
    return hashlib.sha256(os.fsencode(item.name) + item.sha256).hexdigest()[:12]


def grid_thw(spec: EmbeddingSpec) -> list[list[int]] | None:
    """The `grid_thw` of an item as rows of [t, h, w]."""
    for aux in spec.aux:
        if aux.name == "grid_thw" and aux.dtype == "int64":
            values = [number for (number,) in struct.iter_unpack("<q", aux.data)]
            return [values[start : start + 3] for start in range(0, len(values), 3)]
    return None


def _show(results: Sequence[Sent]) -> None:
    for sent in results:
        name = os.fsencode(sent.item).decode(errors="replace")
        if sent.outcome is None:
            assert sent.error is not None
            click.echo(f"{name}  {sent.error.code}: {sent.error.message}")
        else:
            spec = sent.outcome.spec
            click.echo(
                f"{name}  {spec.rows}x{spec.dim} {spec.dtype}  {sent.outcome.nbytes} B  "
                f"sha256 {sent.outcome.sha256.hex()[:16]}"
            )
