"""Rules between settings, and what a type cannot say of one."""

import re
from collections.abc import Callable
from typing import Final

from epd.config.schema import Config, wrong
from epd.runtime.addresses import is_loopback, is_wildcard, parse_address


def check(config: Config) -> None:
    """Raises `ConfigError` for the first rule that is broken."""
    for rule in RULES:
        rule(config)


def _listens_on_loopback(config: Config) -> None:
    for key, text in (("listen", config.listen), ("media_listen", config.media_listen)):
        host = parse_address(text, key=key, to_bind=True).host
        if not is_loopback(host) and config.security.secret_key is None and not config.insecure:
            allowed = (
                "a loopback address such as tcp://127.0.0.1:0, or any with security.secret_key "
                "(or insecure = true, which serves whoever comes)"
            )
            raise wrong(key, repr(text), allowed)


def _exposes_mooncake_knowingly(config: Config) -> None:
    host = parse_address(config.listen, key="listen", to_bind=True).host
    media_host = parse_address(config.media_listen, key="media_listen", to_bind=True).host
    if config.data_plane == "shm" or (is_loopback(host) and is_loopback(media_host)):
        return
    if not (config.security.trusted_network or config.insecure):
        allowed = (
            "'shm', or security.trusted_network = true: Mooncake's own ports authenticate nobody and let "
            "whoever reaches them read what is exported"
        )
        raise wrong("data_plane", f"{config.data_plane!r} beside listen {config.listen!r}", allowed)
    if is_wildcard(host):
        allowed = "one address by which peers reach this host, as Mooncake announces it"
        raise wrong("listen", repr(config.listen), allowed)


def _knows_keys_of_both_sides(config: Config) -> None:
    security = config.security
    if (security.secret_key is None) != (security.peers is None):
        key = "peers" if security.peers is None else "secret_key"
        raise wrong(f"security.{key}", "nothing", "a file: secret_key and peers belong together")


def _dials_whom_its_role_needs(config: Config) -> None:
    if config.role == "encoder" and config.encoders:
        raise wrong("encoders", repr(list(config.encoders)), "nothing for role 'encoder': it is dialled")
    if config.role == "prefill" and not config.encoders:
        raise wrong("encoders", "nothing", "at least one tcp://HOST:PORT for role 'prefill'")
    for address in config.encoders:
        parse_address(address, key="encoders")


def _runs_on_a_known_device(config: Config) -> None:
    device = config.device
    if device in ("auto", "cpu"):
        return
    if device.startswith("cuda:") and device[5:].isdecimal():
        if config.data_plane == "shm":
            raise wrong("device", repr(device), "'auto' or 'cpu' with data_plane 'shm': it is host memory")
        return
    raise wrong("device", repr(device), "'auto', 'cpu' or 'cuda:N'")


def _pushes_where_a_writer_can_be_shut_out(config: Config) -> None:
    if config.direction == "pull":
        return
    if config.data_plane == "shm":
        allowed = "'pull' with data_plane 'shm': a mapping in another process cannot be revoked"
        raise wrong("direction", "'push'", allowed)
    if config.device not in ("auto", "cpu"):
        allowed = f"'pull' with device {config.device!r}: a handle that a peer has opened cannot be revoked"
        raise wrong("direction", "'push'", allowed)


def _has_a_background(config: Config) -> None:
    if not re.fullmatch("#[0-9a-fA-F]{6}", config.pictures.background):
        raise wrong("pictures.background", repr(config.pictures.background), "a colour as #RRGGBB")


def _has_names_that_can_be_shown(config: Config) -> None:
    for key, text in (("node", config.node), ("trace", config.trace)):
        if text is not None and (not text or not text.isprintable()):
            raise wrong(key, repr(text), "printable text that is not empty")


def _suspects_before_it_buries(config: Config) -> None:
    timeouts = config.timeouts
    if timeouts.suspect_after_s <= timeouts.heartbeat_s:
        allowed = f"more than timeouts.heartbeat_s ({timeouts.heartbeat_s:g})"
        raise wrong("timeouts.suspect_after_s", f"{timeouts.suspect_after_s:g}", allowed)
    if timeouts.dead_after_s <= timeouts.suspect_after_s:
        allowed = f"more than timeouts.suspect_after_s ({timeouts.suspect_after_s:g})"
        raise wrong("timeouts.dead_after_s", f"{timeouts.dead_after_s:g}", allowed)


def _holds_media_of_its_largest_item(config: Config) -> None:
    limits = config.limits
    if limits.max_item_media_nbytes > limits.media_nbytes:
        allowed = f"at most limits.media_nbytes ({limits.media_nbytes:_})"
        raise wrong("limits.max_item_media_nbytes", f"{limits.max_item_media_nbytes:_}", allowed)


RULES: Final[tuple[Callable[[Config], None], ...]] = (
    _knows_keys_of_both_sides,
    _listens_on_loopback,
    _exposes_mooncake_knowingly,
    _dials_whom_its_role_needs,
    _runs_on_a_known_device,
    _pushes_where_a_writer_can_be_shut_out,
    _has_a_background,
    _has_names_that_can_be_shown,
    _suspects_before_it_buries,
    _holds_media_of_its_largest_item,
)
