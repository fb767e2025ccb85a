"""TextArena's games through the adapter against the package itself, move by move."""

import random

import pytest
from helpers import table

from rollout.talk import say, settings, vocabulary
from tether.config import DataSection
from tether.errors import UserError
from tether.rollout.environments.textarena import TextArenaGame
from tether.rollout.tools.build import build_episode_source
from tether.types import Prompts

textarena = pytest.importorskip("textarena", reason="the extra `games` is not installed")
GAME = "GuessTheNumber-v0"


def package_says(game: str, seed: int, moves: list[str]) -> tuple[list[str], list[float]]:
    """What the package itself says to a player of these moves, and what it gives at the end."""
    env = textarena.make(f"{game}-raw")
    env.reset(num_players=1, seed=seed)
    told = []
    for move in moves:
        player, messages = env.get_observation()
        told.append("\n".join(text for sender, text, _ in messages if sender != player))
        over, _ = env.step(move)
        if over:
            return told, [float(env.close()[0][player])]
    return told, []


def episodes(tokenizer, seeds: list[int], **arguments):
    own = {"kind": "textarena", "arguments": {"game": GAME, **arguments}}
    section = settings(
        tools=[],
        environment=own,
        max_turns=20,
        max_observation_tokens=300,
        max_response_tokens=2000,
    )
    data = DataSection(train="environment", max_prompt_tokens=2000)
    n = len(seeds)
    rows = [{"seed": seed} for seed in seeds]
    prompts = Prompts([""] * n, [[]] * n, rows, [0] * n, [""] * n, [None] * n)
    return build_episode_source(section, vocabulary(tokenizer), data).episodes(prompts)


def test_prompts_observations_and_rewards_are_the_packages_own(byte_tokenizer):
    moves = [f"[{n}]" for n in (10, 5, 15, 3, 8, 12, 18, 1, 20, 7)]
    for row, seed in zip(episodes(byte_tokenizer, [3, 4, 5]), (3, 4, 5), strict=True):
        told, final = package_says(GAME, seed, moves)
        prompt = byte_tokenizer.decode(row.prompt_ids)
        assert prompt == f"<|user|>{told[0]}<|assistant|>"
        for number, move in enumerate(moves[: len(told)], start=1):
            answer = say(row, f"{move}<|end|>")
            if number == len(told):
                assert answer is None
                assert row.turn_rewards == (*[0.0] * (number - 1), *final)
            else:
                assert answer == f"<|user|>{told[number]}<|assistant|>"


def test_games_beside_each_other_do_not_change_each_others_numbers():
    alone = []
    for seed in (1, 2):
        game = TextArenaGame(GAME)
        alone.append([game.reset({"seed": seed}), *(game.step(f"[{n}]") for n in (3, 17))])
    before = random.getstate()
    games = [TextArenaGame(GAME), TextArenaGame(GAME)]
    mixed = [[game.reset({"seed": seed})] for game, seed in zip(games, (1, 2), strict=True)]
    for move in ("[3]", "[17]"):
        for game, said in zip(games, mixed, strict=True):
            said.append(game.step(move))
    assert mixed == alone
    assert random.getstate() == before


def test_brackets_are_put_around_a_bare_move():
    first, second = TextArenaGame(GAME), TextArenaGame(GAME)
    first.reset({"seed": 1})
    second.reset({"seed": 1})
    assert first.step("4") == second.step("[4]")


@table(
    ("arguments", "why"),
    [
        ({"game": "NoSuchGame-v0"}, "has no game 'NoSuchGame-v0'"),
        ({"game": "Chess-v0"}, "does not begin with one player"),
        ({"game": 7}, "needs arguments: {game: NAME}"),
    ],
)
def test_what_is_no_game_of_one_player_is_refused_before_training(byte_tokenizer, arguments, why):
    with pytest.raises(UserError) as refused:
        episodes(byte_tokenizer, [1], **arguments)
    assert why in str(refused.value)
