"""What-if for all rows of an iteration: how many tokens would be clipped, how advantages spread."""

from collections.abc import Mapping

from tether.view.api import Body, rows_of, settings_of
from tether.view.pictures import histogram, shared_edges
from tether.view.run_reader import Run
from tether.view.settings import controls_for_page, read_settings, samples_per_prompt


def batch_what_if(run: Run, iteration: int, query: Mapping[str, str]) -> Body:
    """Return the batch before and after other settings; one that cannot be is a UserError."""
    rows, config = rows_of(run, iteration), run.read_config()[1]
    own = settings_of(run, iteration, next(iter(rows.by_number.values()), {}))
    settings = read_settings(query, config, own)
    from tether.view.whatif import recompute_batch  # loads torch

    before, after, note = recompute_batch(rows, own, settings, samples_per_prompt(config))
    edges = shared_edges(before.advantages, after.advantages)
    turned = sum(
        (a > 0) != (b > 0) for a, b in zip(before.advantages, after.advantages, strict=True)
    )
    return {
        "controls": controls_for_page(own, config),
        "own": settings == own,
        "before": before.numbers,
        "after": after.numbers,
        "turned": turned,
        "histograms": {
            "before": histogram(before.advantages, edges),
            "after": histogram(after.advantages, edges),
        },
        "note": note,
        "problems": rows.problems,
    }
