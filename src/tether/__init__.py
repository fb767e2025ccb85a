"""tether: PPO post-training for language models, with every number in view.

`tether.train(config, reward=fn)`, `tether.evaluate` and `tether.generate` are what the commands
call; `tether.start` is `train` step by step; `tether.sft` and `tether.reward_model` are the two
stages before. `help(tether.train)` says more. What they need is imported on first use, so that
`import tether` costs nothing.
"""

import sys
from typing import TYPE_CHECKING, Any

import tether.train  # noqa: F401 (a later import would take the name of the function below)

__version__ = "0.1.0"
__all__ = [
    "Config",
    "TokenRewards",
    "TurnRewards",
    "check",
    "diff",
    "doctor",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "resume",
    "reward_model",
    "sft",
    "start",
    "trace",
    "train",
]

if TYPE_CHECKING:
    from tether.api import (
        ConfigLike,
        check,
        diff,
        doctor,
        evaluate,
        export,
        generate,
        resume,
        reward_model,
        sft,
        start,
        trace,
    )
    from tether.config import Config
    from tether.config.load import load_config
    from tether.rewards.functions import Reward
    from tether.rewards.values import TokenRewards, TurnRewards
    from tether.train.training import Result
    from tether.train.watch import Watcher

_ROOMS = ("algo", "api", "config", "errors", "plots")


def train(
    config: "ConfigLike",
    reward: "Reward | None" = None,
    watch: "Watcher | None" = None,
    resume: bool = False,
    allow_changed: bool = False,
    quiet: bool = False,
) -> "Result":
    """Train as `tether train` does, and return a `Result`: the run directory, and what was measured
    on held-out prompts before and after.

    config         a Config (`tether.load_config`), a mapping of sections, a shipped recipe's name,
                   or the path of a YAML file
    reward         a function, used instead of `reward.kind`; it gets the arguments that it names
    watch          an object with the methods of `tether.train.watch.Watcher`, told of every step
    resume         go on with the run at `run.dir`, if there is one
    allow_changed  go on although config, data, model or torch changed
    quiet          print nothing; else a terminal and a notebook are shown how the run goes
    """
    from tether import api

    if watch is not None or quiet or not _is_watched():
        return api.train(config, reward, watch, resume, allow_changed)
    from tether.cli.display import Display

    config = api.as_config(config)
    with Display(config) as display:
        result = api.train(config, reward, display, resume, allow_changed)
    display.summary(result)
    return result


def _is_watched() -> bool:
    """Return whether a person reads what is printed: on a terminal, or in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _ROOMS:
        return import_module(f"tether.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'tether' has no attribute {name!r}")
    modules = {
        "Config": "tether.config",
        "load_config": "tether.config.load",
        "TokenRewards": "tether.rewards.values",
        "TurnRewards": "tether.rewards.values",
    }
    return getattr(import_module(modules.get(name, "tether.api")), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
