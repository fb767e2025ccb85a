"""`tether export`: a trained model for everyone else's tools."""

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.overrides import TrustRun
from tether.cli.text import printable


def export(
    run: Annotated[Path, typer.Argument(help="The run whose newest checkpoint is written.")],
    directory: Annotated[Path, typer.Argument(help="Where to; it must not exist yet.")],
    trust_run: TrustRun = False,
) -> None:
    """Write RUN's model as a plain Hugging Face directory.

    DIRECTORY gets safetensors, tokenizer, generation settings and a model card; an adapter is
    merged into its base.
    """
    from tether import api

    place = api.export(run, directory, trust_run)
    print(f"  → {printable(str(place))}")
