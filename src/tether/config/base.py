"""What every config section is made of. Imports no torch."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
)

SCHEMA = 1
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean, such as Adam's
Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]


def cores() -> int:
    """Count the CPU cores that this process may use: its share, where torchrun started several."""
    affinity = getattr(os, "sched_getaffinity", None)
    here = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Section(BaseModel):
    """A frozen group of settings; unknown keys, infinities and NaN are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


# path/file.py:name, or the name of a module that can be imported: package.module:name
OWN_CODE = r"^(.*\.py|[A-Za-z_]\w*(\.\w+)*):\w+$"
OwnCode = Annotated[str, Field(pattern=OWN_CODE)]


def count_values(value: Any, limit: int) -> int:
    """Count the values of parsed YAML as JSON would write them, up to `limit`.

    An alias counts as everything it stands for; one that contains itself is a RecursionError.
    """
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    total = 1
    for item in inner:
        if total >= limit:
            break
        total += count_values(item, limit - total)
    return total
