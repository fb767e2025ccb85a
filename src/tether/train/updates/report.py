"""What an update tells of itself."""

from dataclasses import dataclass, field

from torch import Tensor

from tether.run.events import Event
from tether.run.metrics import Meter


@dataclass
class Report:
    meter: Meter = field(default_factory=Meter)
    events: list[Event] = field(default_factory=list)

    def dropped_step(self, role: str, norm: Tensor) -> None:
        message = f"the {role}'s gradient norm was {float(norm)}; the step was dropped"
        self.events.append(Event("non_finite_gradient", message))
