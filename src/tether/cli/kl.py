"""`tether kl`: the divergence of two distributions, both ways."""

from typing import Annotated, Literal

import typer

from tether.cli.sections import print_sections

COMMAND = {"context_settings": {"ignore_unknown_options": True}}  # a negative number is no option


def kl(
    p: Annotated[str, typer.Argument(metavar="P", help="Probabilities, as in 0.8,0.2 or 1/6,5/6.")],
    q: Annotated[str, typer.Argument(metavar="Q", help="Those of the same outcomes.")],
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Also estimate from so many draws of P."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other draws.")] = 0,
    lang: Annotated[Literal["en", "zh"], typer.Option(help="English or Chinese.")] = "en",
) -> None:
    """Print KL(P‖Q) and KL(Q‖P), exact, in nats and bits, term by term."""
    from tether.explain.divergence import parse_pair, tell_exact, tell_samples

    pair = parse_pair(p, q)
    sections = [tell_exact(*pair, lang)]
    if samples is not None:
        sections.append(tell_samples(*pair, samples, seed, lang))
    print_sections(sections)
