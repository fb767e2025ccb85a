"""One iteration, the updates inside it, the loop around it.

`tether.train` is both this room and what people call to train, so the room answers a call.
"""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tether.api import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
