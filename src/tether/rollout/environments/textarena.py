"""TextArena's single-player games as environments (extra `games`). Imports no torch.

A game draws from Python's global random numbers. Here each has a state of its own, and one game
moves at a time: otherwise the rows of a batch would change each other's.
"""

import importlib
import random
import threading
from collections.abc import Mapping
from typing import Any

from tether.errors import UserError, describe
from tether.rollout.environments.results import Step

_lock = threading.Lock()


class TextArenaGame:
    """A game of one player, who reads what the package says to it, without its own moves again.

    The package rewards the end of a game; a move before it earns 0.
    """

    def __init__(self, game: str, **arguments: Any) -> None:
        package = _package()
        names = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        if game not in names:
            raise UserError(
                f"TextArena has no game {game!r}; see textarena.pprint_registry_detailed()."
            )
        raw = game if game.endswith("-raw") or f"{game}-raw" not in names else f"{game}-raw"
        self.player = 0
        with _lock:
            self.game = package.make(raw, **arguments)
        self.random = random.Random(0).getstate()

    def reset(self, columns: Mapping[str, Any]) -> str:
        """Begin the game that follows from the row's seed; return the rules."""
        seed = int(columns.get("seed", 0))
        self.random = random.Random(seed).getstate()
        return self._turn(lambda: self.game.reset(num_players=1, seed=seed))[1]

    def step(self, text: str) -> Step:
        """Make a move; square brackets are put around it where it has none, as the package does."""
        move = text if "[" in text and "]" in text else f"[{text.strip()}]"
        done, observation = self._turn(lambda: self.game.step(move)[0])
        if not done:
            return Step(observation, 0.0)
        rewards, _ = self.game.close()
        return Step(None, float((rewards or {}).get(self.player, 0.0)), terminated=True)

    def _turn(self, move: Any) -> tuple[bool, str]:
        """Run a move on random numbers of its own; return whether it is over, and what is said."""
        with _lock:
            outside = random.getstate()
            random.setstate(self.random)
            try:
                done = bool(move())
                said = "" if done else self._said()
            finally:
                self.random = random.getstate()
                random.setstate(outside)
        return done, said

    def _said(self) -> str:
        self.player, messages = self.game.get_observation()
        if isinstance(messages, str):
            return messages
        return "\n".join(text for sender, text, _ in messages if sender != self.player)


def check_game(arguments: Mapping[str, Any]) -> None:
    """Refuse, before training, a game that cannot begin with one player."""
    if not isinstance(arguments.get("game"), str):
        raise UserError(
            "rollout.environment textarena needs arguments: {game: NAME}, such as "
            "GuessTheNumber-v0."
        )
    try:
        TextArenaGame(**arguments).reset({"seed": 0})
    except UserError:
        raise
    except Exception as error:  # a game may raise anything, such as over the number of players
        game = arguments["game"]
        raise UserError(
            f"TextArena's {game} does not begin with one player: {describe(error)}."
        ) from None


def _package() -> Any:
    try:
        return importlib.import_module("textarena")
    except ImportError:
        raise UserError(
            "rollout.environment textarena needs the package: pip install '.[games]'."
        ) from None
