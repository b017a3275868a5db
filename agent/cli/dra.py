"""`fairlead dra`: what a cluster needs so that pods get this node's devices by dynamic resource allocation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from agent.cli import options, output
from agent.config import Config


@click.command(epilog="Exit codes: 0 done, 2 the configuration has mistakes.")
@click.argument("what", type=click.Choice(["classes", "examples"]))
@options.config
@options.as_json
def dra(what: str, config: Path | None, as_json: bool) -> None:
    """Print DeviceClasses for the resources that have serve = "dra", or examples of claims and pods for what is here.

    Where none has, it prints what would be so if all had.

    An administrator applies the classes once for the cluster. A class also has the resource's own name, so that pods which
    ask for it in their limits go on working. With --json it prints a List of the same objects.
    """
    import yaml

    from agent.config import load
    from agent.dra import manifests
    from agent.runtime import logs

    logs.set_up("error")
    loaded = load(config)
    offered = _offered(loaded)
    made = manifests.classes(list(offered), loaded.dra.driver) if what == "classes" else manifests.examples(offered)
    objects = list(made)
    if as_json:
        output.echo_json({"apiVersion": "v1", "kind": "List", "items": objects})
    else:
        output.echo(yaml.safe_dump_all(objects, sort_keys=False, width=1000, explicit_start=True).rstrip("\n"))


def _offered(config: Config) -> dict[str, Sequence[dict[str, object]]]:
    """The resources that are served so, or all where none is, each with its devices as slices have them."""
    import anyio

    from agent.discovery.backend_factory import make_backends
    from agent.dra import slices
    from agent.inventory.survey import PATIENCE, survey

    served = {it.name for it in config.resources if it.spec.serve == "dra" or not config.uses_dra}
    backends = make_backends(config.host, config.resources)
    inventory = anyio.run(survey, config.resources, backends, PATIENCE).inventory
    found: dict[str, Sequence[dict[str, object]]] = {}
    for name, resource in inventory.selection.resources.items():
        if resource.configured in served:
            mine = [it for it in inventory.placed() if it.placed is not None and it.placed.resource == name]
            offers = slices.offers(mine, inventory.slots(name), {})
            known = backends[resource.spec.backend].attributes
            made = slices.entries(offers, name, known, config.dra.driver, (), 0.0, {})
            found[name] = [it.entry for it in made.values()]
    return found
