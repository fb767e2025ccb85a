"""Numbers that are not finite: found before they reach a weight, and named."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.run.events import Event
from tether.types import Scores


def drop_non_finite_rows(
    scores: Scores,
    mask: Bool[Tensor, "rows response"],
    rollout_log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    ref_log_probs: Float[Tensor, "rows response"],
    values: Float[Tensor, "rows response"],
    values_after: Float[Tensor, " rows"],
) -> tuple[Scores, list[Event]]:
    """Rows that hold a NaN or an infinity leave, as unscorable ones do, with an event each."""
    culprits = {
        "rollout_log_probs": ~finite_rows(rollout_log_probs, mask),
        "old_log_probs": ~finite_rows(old_log_probs, mask),
        "ref_log_probs": ~finite_rows(ref_log_probs, mask),
        "values": ~(finite_rows(values, mask) & (values_after.isfinite() | ~mask.any(dim=1))),
    }
    bad = torch.stack(list(culprits.values())).any(dim=0)
    if not bool(bad.any()):
        return scores, []
    events = []
    for row in bad.nonzero().squeeze(1).tolist():
        names = ", ".join(name for name, rows in culprits.items() if rows[row])
        events.append(Event("non_finite_row", f"{names} not finite; the row was left out", row))
    return scores.without(bad), events


def finite_rows(
    x: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"]
) -> Bool[Tensor, " rows"]:
    return (x.isfinite() | ~mask).all(dim=1)


def keep(mask: Bool[Tensor, "rows response"], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The True cells as they are, 0 elsewhere."""
    return tuple(torch.where(mask, x, 0.0) for x in tensors)
