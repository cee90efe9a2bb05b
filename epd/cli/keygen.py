"""`epd keygen`: a key pair in two files."""

import click

from epd.runtime.keys import new_keys, write_keys


@click.command("keygen")
@click.argument("file", type=click.Path(path_type=str))
def keygen_command(file: str) -> None:
    """Write a new secret key to FILE, readable by its owner only, and the public one to FILE.pub.

    The public key is printed: it goes into the list of peers of those who are to know this node.
    """
    keys = new_keys()
    write_keys(file, keys)
    click.echo(keys.public)
