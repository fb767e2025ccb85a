"""Notices of a run from which nothing can be learnt any more.

Three signs, all read off the metrics of an iteration. Each is reported once per stretch, and
nothing is stopped: a run may recover, and its user decides.
"""

from collections.abc import Mapping

from tether.run.metrics import Event

FLAT_ITERATIONS = 5  # in a row without a difference between scores
LARGEST_APPROX_KL = 1.0  # nats per token that one iteration may move the policy; 0.02 is usual


class NoiseNotice:
    """Reads the metrics of one iteration after the other."""

    def __init__(self) -> None:
        self.flat = 0
        self.jumped = False
        self.silent = False

    def read(self, metrics: Mapping[str, float]) -> list[Event]:
        return [*self._flat(metrics), *self._jump(metrics), *self._silence(metrics)]

    def _flat(self, metrics: Mapping[str, float]) -> list[Event]:
        alike = metrics.get("score/std") == 0
        groups_alike = metrics.get("advantage/zero_spread_share") == 1
        self.flat = self.flat + 1 if alike or groups_alike else 0
        if self.flat != FLAT_ITERATIONS:
            return []
        what = (
            "all responses scored alike" if alike else "the responses to each prompt scored alike"
        )
        return [
            Event(
                "nothing_to_learn",
                f"{FLAT_ITERATIONS} iterations in a row {what}, so that there is nothing to learn "
                f"from but the KL; see 'Score stuck' in docs/troubleshooting.md",
            )
        ]

    def _jump(self, metrics: Mapping[str, float]) -> list[Event]:
        moved = metrics.get("actor/approx_kl", 0.0)
        far = moved > LARGEST_APPROX_KL
        news = far and not self.jumped
        self.jumped = far
        if not news:
            return []
        return [
            Event(
                "policy_jumped",
                f"one iteration moved the policy by actor/approx_kl = {moved:.2g} nats per token, "
                f"where 0.02 is usual: what it had learnt is likely lost; lower actor.lr, "
                f"actor.epochs or actor.entropy_coef, or set actor.stop_kl",
            )
        ]

    def _silence(self, metrics: Mapping[str, float]) -> list[Event]:
        silent = metrics.get("tools/calls_mean") == 0
        news = silent and not self.silent
        self.silent = silent
        if not news:
            return []
        return [
            Event(
                "tools_not_called",
                "no response of this iteration called a tool or the environment, so that nothing "
                "is learnt about using it; the prompt must describe the marks, and the policy must "
                "write them now and then: see 'Tools' in docs/search.md",
            )
        ]
