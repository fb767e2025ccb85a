"""What an update tells of itself."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from tether.dist.reduce import gather, total
from tether.run.events import Event
from tether.run.metrics import Meter


@dataclass
class Report:
    """Metrics and events of one role's update; an update that did not happen has none."""

    meter: Meter = field(default_factory=Meter)
    events: list[Event] = field(default_factory=list)
    new_log_probs: Tensor | None = None  # rows x response, each row's last training forward
    penalty_coef: float | None = None  # PPO-Penalty's weight for the next iteration
    tried: bool = False  # there was an update to make, even if no row was left for it
    taken: int = 0  # optimizer steps

    def gather(self, own: Bool[Tensor, " rows"]) -> None:
        """Metrics of all processes as one; each row's log-probs from whoever read it last."""
        meters = gather(self.meter.settled())
        self.meter = meters[0]
        for other in meters[1:]:
            self.meter.merge(other)
        if self.new_log_probs is not None:
            mine = own.to(self.new_log_probs.device)[:, None]
            self.new_log_probs = total(torch.where(mine, self.new_log_probs, 0.0))

    def event(self, kind: str, message: str) -> None:
        self.events.append(Event(kind, message))
