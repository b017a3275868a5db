"""`fairlead dra`: what a cluster needs so that pods get this node's devices by dynamic resource allocation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.cli import commands, connection, output
from agent.runtime.errors import unknown

if TYPE_CHECKING:
    from agent.config import Config


@click.command(
    epilog="Exit codes: 0 done, 1 no daemon answers, 2 the configuration has mistakes, or has no such resource."
)
@click.argument("what", type=click.Choice(["classes", "examples", "switch"]))
@click.argument("resource", required=False)
@click.option("--dry-run", is_flag=True, help="Of switch: say what would happen. You switch by `serve` in the file.")
@commands.config
@commands.as_json
def dra(what: str, resource: str | None, dry_run: bool, config: Path | None, as_json: bool) -> None:
    """Print DeviceClasses for the resources that have serve = "dra", or examples of claims and pods for what is here.

    Where none has, it prints what would be so if all had. An administrator applies the classes once for the cluster. A class also
    has the resource's own name, so that pods which ask for it in their limits go on working. With --json it prints a List of
    the same objects.

    `fairlead dra switch RESOURCE --dry-run` says what becomes of each device where a reload has the other API serve
    RESOURCE; with --json {"resource", "from", "to", "stays": [{"device", "pods"}], "moves": [DEVICE]}.
    """
    if what == "switch":
        _switch(resource or "", config, is_dry=dry_run, as_json=as_json)
        return
    if resource is not None or dry_run:
        raise click.UsageError(
            f"`fairlead dra {what}` prints it for all resources; RESOURCE and --dry-run are switch's"
        )
    import yaml

    from agent.config import load
    from agent.dra.names import classes, examples
    from agent.runtime import logs

    logs.set_up("error")
    loaded = load(config)
    offered = _offered(loaded)
    made = classes(list(offered), loaded.dra.driver) if what == "classes" else examples(offered)
    objects = list(made)
    if as_json:
        output.echo_json({"apiVersion": "v1", "kind": "List", "items": objects})
    else:
        output.echo(yaml.safe_dump_all(objects, sort_keys=False, width=1000, explicit_start=True).rstrip("\n"))


def _offered(config: Config) -> dict[str, Sequence[dict[str, object]]]:
    """The resources that are served so, or all where none is, each with its devices as slices have them."""
    import anyio

    from agent.discovery.backend_answers import make_backends
    from agent.dra import slices
    from agent.inventory.survey import PATIENCE, survey

    served = {it.name for it in config.resources if it.spec.serve == "dra" or not config.uses_dra}
    backends = make_backends(config.host, config.resources)
    inventory = anyio.run(survey, config.resources, backends, PATIENCE).inventory
    found: dict[str, Sequence[dict[str, object]]] = {}
    for name, resource in inventory.selection.resources.items():
        if resource.configured in served:
            offers = slices.offers(slices.named(inventory.placed_in(name)), inventory.slots(name), {})
            known = backends[resource.spec.backend].attributes
            made = slices.entries(offers, name, known, config.dra.driver, (), 0.0, {})
            found[name] = [it.entry for it in made.values()]
    return found


def _switch(name: str, config: Path | None, *, is_dry: bool, as_json: bool) -> None:
    """Say what a change of `serve` would mean for a resource.

    Raises:
        click.UsageError: there is none of this name, or it is to be done.
        FairleadError: no daemon answers.
    """
    from agent.config import load
    from agent.console.control import Client

    shown = connection.ask(config, Client.status)
    of_daemon = Path(shown.configuration.file) if shown.configuration.file else config
    resource = next((it for it in shown.resources if it.name == name), None)
    if resource is None:
        raise click.UsageError(unknown("resource", name, [it.name for it in shown.resources]))
    if not is_dry:
        raise click.UsageError(
            "the configuration is yours: change `serve` there and run `fairlead reload`; --dry-run says what that means"
        )
    written = {it.name: it.spec.serve for it in load(of_daemon).resources}
    template = next((it.name for it in shown.templates if name in it.resources), name)
    is_dra = written.get(template) == "dra"
    before, after = ("dra", "device-plugin") if is_dra else ("device-plugin", "dra")
    stays = {it.key: it.pods for it in resource.devices if it.held}
    moves = [it.key for it in resource.devices if not it.held]
    if as_json:
        kept = [{"device": key, "pods": list(pods)} for key, pods in stays.items()]
        output.echo_json({"resource": name, "from": before, "to": after, "stays": kept, "moves": moves})
        return
    first = (
        "its ResourceSlices are deleted, and only then the device plugin registers"
        if is_dra
        else "the device plugin ends: the node's capacity of it is 0 at once; running pods keep what they have"
    )
    until = "given to no pod by device plugin" if is_dra else "in no ResourceSlice"
    output.echo(output.wrapped(f"{name} is served by {before}. With serve = {after!r} and a reload, {first}.", 0))
    output.echo(f"Until their pods end, {until}: {len(stays) or 'none'}")
    for key, pods in stays.items():
        output.echo(f"  {key}  {', '.join(pods) or 'a pod that is not known yet'}")
    output.echo(f"Offered by {after} at once: {len(moves) or 'none'}")
    for key in moves:
        output.echo(f"  {key}")
