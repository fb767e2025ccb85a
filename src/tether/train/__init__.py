"""tether.train(config, reward=None, watch=None, resume=False, allow_changed=False, quiet=False)

Train as `tether train` does, and return a `Result`: the run directory, and what was measured on
held-out prompts before and after.

    config         a Config (`tether.load_config`), a mapping of sections, a shipped recipe's name,
                   or the path of a YAML file
    reward         a function, used instead of `reward.kind`; it gets the arguments that it names
    watch          an object with the methods of `tether.train.watch.Watcher`, told of every step
    resume         go on with the run at `run.dir`, if there is one
    allow_changed  go on although config, data, model or torch changed
    quiet          print nothing; else a terminal and a notebook are shown how the run goes

(This is also the package that holds one iteration, the updates inside it and the loop around it.)
"""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(
        self,
        config: Any,
        reward: Any = None,
        watch: Any = None,
        resume: bool = False,
        allow_changed: bool = False,
        quiet: bool = False,
    ) -> Any:
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
    """Whether a person reads what is printed: on a terminal, or in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


sys.modules[__name__].__class__ = _Room
