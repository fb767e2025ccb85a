"""`tether view`: the web page over runs."""

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.terminal import complain
from tether.errors import UserError
from tether.run.directory import RUNS

PORT = 8377


def view(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a folder of runs.")] = RUNS,
    port: Annotated[int, typer.Option(help="Port of the page.")] = PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine a token is asked for.")
    ] = "127.0.0.1",
    export: Annotated[
        Path | None, typer.Option(help="Write the page into this new folder instead.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show the recorded run that ships.")] = False,
) -> None:
    """Show runs in the browser: live curves, every token's numbers, what-if."""
    from tether.assets import resolve
    from tether.view.run_reader import Folder

    path = resolve("tether:recorded") if demo else path
    if not path.is_dir():
        raise UserError(
            f"{path} is not a folder; name a run or a folder of runs, or write --demo to see a "
            f"recorded one."
        )
    folder = Folder(path)
    if export is not None:
        from tether.view.export import export_page

        count = export_page(folder, export, demo)
        print(f"{export}/index.html: {count} runs, to be opened from disk")
        return

    from tether.view.server import serve

    def ready(address: str) -> None:
        what = "the recorded run" if demo else path
        print(f"{what} at {address} (Ctrl-C ends it)", flush=True)
        if "?token=" in address:
            complain(
                "Other machines can reach this page: whoever has the address above can read these "
                "runs, and nothing is encrypted on the way."
            )

    serve(folder, host, port, demo, ready)
