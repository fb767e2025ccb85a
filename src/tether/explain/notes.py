"""Which remarks a trace needs so that its numbers are not misread: keys of `words`."""

from collections.abc import Mapping
from typing import Any

from tether.explain.subject import Subject


def find_notes(record: Mapping[str, Any], subject: Subject) -> list[str]:
    """In the order of the data flow."""
    config, tokens = subject.config, record["tokens"]
    has_critic = record["new_values"] is not None
    kl = config.kl
    remarks = {
        "note_given": record["response_given"],
        "note_sampled": not record["response_given"],
        "note_masked": not all(tokens["response_mask"]),
        "note_truncated": record["finish_reason"] == "length" and record["score"] is not None,
        "note_bootstrap": record["finish_reason"] == "length" and record["score"] is None,
        "note_no_reference": not kl.needs_reference,
        "note_same_reference": kl.needs_reference
        and subject.checkpoint is None
        and config.model.reference in (None, config.model.actor),
        "note_no_critic": not has_critic,
        "note_zero_head": has_critic and not any(tokens["values"]),
        "note_group": record["settings"]["rows"] > 1,
        "note_no_signal": not any(tokens["policy_advantages"]),
        "note_whitening": config.advantage.whitens,
        "note_fresh_adam": subject.checkpoint is None and config.actor.update.kind != "trpo",
        "note_restored_adam": subject.checkpoint is not None and config.actor.update.kind != "trpo",
        "note_not_saved": True,
    }
    return [name for name, said in remarks.items() if said]
