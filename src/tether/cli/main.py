"""`tether`: the list of commands, and what a person sees when one fails. Imports no torch."""

import errno
import io
import os
import signal
import sys
from typing import Annotated

import typer

from tether import __version__
from tether.cli import diff, doctor, explain, listing, models, stages, train, view
from tether.cli.field_options import WITH_FIELDS
from tether.cli.terminal import complain
from tether.dist.environment import launched_rank
from tether.errors import OthersLost, RunStopped, UserError, one_line

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    name="tether",
    help="PPO post-training for language models, with every number in view.",
    epilog="Start with `tether train`: it needs no argument, no GPU and no network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train", **WITH_FIELDS)(train.train)
app.command("resume", **WITH_FIELDS)(train.resume)
app.command("check", **WITH_FIELDS)(train.check)
app.command("eval", **WITH_FIELDS)(models.evaluate)
app.command("generate")(models.generate)
app.command("probe")(models.probe)
app.command("export")(models.export)
app.command("sft", **stages.SFT)(stages.sft)
app.command("reward-model", **stages.REWARD_MODEL)(stages.reward_model)
app.command("view")(view.view)
app.command("doctor")(doctor.doctor)
app.command("diff")(diff.diff)
app.command("trace", **WITH_FIELDS)(explain.trace)
app.command("kl", **explain.KL)(explain.kl)
app.command("examples")(explain.examples)
app.command("serve-retriever")(models.serve_retriever)
app.command("init")(listing.init)
app.command("recipes")(listing.recipes)
app.command("fetch")(listing.fetch)
app.command("runs")(listing.runs)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tether {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    # Ctrl-C while modules load would be lost in an import; a run sets its own handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # Threads that wait by spinning for long make a run crawl as soon as another program wants a
    # core; a short spin costs nothing then and little else.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        app()
    except UserError as error:
        _complain_once(error)
        sys.exit(2)
    except RunStopped as error:
        _complain_once(error)
        sys.exit(1)
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        _write_no_more()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        # The run's own files have sentences of their own: this is the command's output.
        _write_no_more()
        complain(
            f"The output of this command could not be written: {one_line(error).lower()}. "
            f"Make room, or write it elsewhere; a run goes on with `tether resume`."
        )
        sys.exit(1)


def _write_no_more() -> None:
    """Let what is left in the buffer of the output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain_once(error: UserError | RunStopped) -> None:
    """Print an error on rank 0 only: all processes of a run meet the same one."""
    if launched_rank() == 0 or isinstance(error, OthersLost):
        complain(str(error))


if __name__ == "__main__":
    main()
