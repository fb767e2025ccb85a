"""tether: PPO post-training for language models, with every number in view.

`tether.train(config, reward=fn)`, `tether.evaluate` and `tether.generate` are what the commands
call. They are imported on first use, so that `import tether` costs nothing.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "check", "evaluate", "generate", "load_config", "resume", "trace", "train"]

if TYPE_CHECKING:
    from tether.api import check, evaluate, generate, resume, trace, train
    from tether.config import Config
    from tether.recipes import load_config


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tether' has no attribute {name!r}")
    from importlib import import_module

    if name == "train":
        return import_module("tether.train")  # the room, which answers a call
    room = {"Config": "tether.config", "load_config": "tether.recipes"}.get(name, "tether.api")
    return getattr(import_module(room), name)
