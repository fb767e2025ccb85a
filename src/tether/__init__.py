"""tether: PPO post-training for language models, with every number in view.

`tether.train(config, reward=fn)`, `tether.evaluate` and `tether.generate` are what the commands
call; `tether.sft` and `tether.reward_model` are the two stages before. `help(tether.train)` says
more. They are imported on first use, so that `import tether` costs nothing.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Config",
    "check",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "resume",
    "reward_model",
    "sft",
    "trace",
    "train",
]

if TYPE_CHECKING:
    from tether.api import (
        check,
        evaluate,
        export,
        generate,
        resume,
        reward_model,
        sft,
        trace,
        train,
    )
    from tether.config import Config
    from tether.recipes import load_config


_ROOMS = ("api", "config", "errors", "recipes")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _ROOMS or name == "train":  # `tether.train` is a room that answers a call
        return import_module(f"tether.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'tether' has no attribute {name!r}")
    room = {"Config": "tether.config", "load_config": "tether.recipes"}.get(name, "tether.api")
    return getattr(import_module(room), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
