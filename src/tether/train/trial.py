"""The reward tried on a few rows before anything is trained: what it returned, or why it did not.

The responses are made up: the row's own answer where it has one, which most rewards score high,
else a word. A reward may rightly have no score for such a response, so nothing is refused but a
function whose every return value is no score at all.
"""

from dataclasses import dataclass

from tether.config import Config
from tether.errors import UserError
from tether.rewards.scorers import ChildScorer, InProcessScorer, Scorer, Verdict
from tether.train.scoring import reward_row, shortened
from tether.types import Prompts

ROWS = 3
ANSWERS = ("answer", "ground_truth", "solution", "target")  # columns that often hold one
NO_ANSWER = "Hello."


@dataclass(frozen=True)
class Trial:
    where: str
    response: str
    verdict: Verdict

    @property
    def result(self) -> str:
        return "no score" if self.verdict.score is None else f"{self.verdict.score:g}"

    @property
    def why(self) -> str:
        """The response that was scored, and what went wrong."""
        problem = "" if self.verdict.problem is None else f": {self.verdict.problem}"
        made_up = "made-up " if self.response == NO_ANSWER else ""
        return f"for the {made_up}response {shortened(self.response)!r}{problem}"


def try_reward(scorer: Scorer, prompts: Prompts, config: Config) -> list[Trial]:
    """Return what the reward says to a few prompts; nothing of a reward model, which has no code
    of a user's in it."""
    if not isinstance(scorer, ChildScorer | InProcessScorer):
        return []
    responses = [_response(columns) for columns in prompts.columns]
    verdicts = scorer.score(
        [
            reward_row(prompts, row, response, "eos", [(True, response)])
            for row, response in enumerate(responses)
        ]
    )
    places = [
        f"{file}, row {position + 1}"
        for file, position in zip(prompts.files, prompts.positions, strict=True)
    ]
    if verdicts and all(verdict.wrong_type for verdict in verdicts):
        raise UserError(
            f"The reward {config.reward.label} does not work: {verdicts[0].problem}; return a "
            f"number, or None for no opinion."
        )
    return [Trial(*found) for found in zip(places, responses, verdicts, strict=True)]


def _response(columns: dict) -> str:
    for name in ANSWERS:
        answer = columns.get(name)
        if isinstance(answer, dict):
            answer = answer.get("target")
        if isinstance(answer, list) and answer:
            answer = answer[0]
        if isinstance(answer, str | int | float):
            return str(answer)
    return NO_ANSWER
