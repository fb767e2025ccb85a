"""S6: model directories that want code of their own run, or files and hosts of others read.

Every directory is tried by three commands in a process where looking up a host or connecting leaves
a trace. It is refused in one sentence, or loads and none of its wishes is granted.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from faults.attempt import Attempt, attempt, no_traceback, refused
from faults.pickle_slots import Bomb
from faults.row import Row, tally
from faults.world import World

COMMANDS = ("check", "train", "generate")

# A module with every class that a config could ask for; importing it is enough.
CODE = """
open({canary!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class EvilConfig(LlamaConfig): model_type = "evil"
class EvilModel(LlamaForCausalLM): config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast): pass
"""


@dataclass(frozen=True)
class Tripwire:
    """Called in the new process: from then on a look at the network leaves a file."""

    canary: Path

    def __call__(self) -> None:
        def trip(*arguments: object, **named: object) -> None:
            self.canary.touch()
            raise OSError("no network here")

        socket.getaddrinfo = trip
        socket.socket.connect = trip


@dataclass(frozen=True)
class Hostile:
    """`words` are in the refusal; without them the directory may as well load, as long as nothing
    of it is run."""

    name: str
    spoil: Callable[[Path, Path], None]
    words: tuple[str, ...] = ()


def row_s6(world: World, folder: Path, tries: int, seed: int) -> Row:
    verdicts = [_try(world, folder / str(i), case) for i, case in enumerate(HOSTILE[:tries])]
    return tally("S6", "hostile model directories", verdicts)


def _try(world: World, folder: Path, case: Hostile) -> str | None:
    model, canary = folder / "model", folder / "canary"
    shutil.copytree(world.model, model)
    code = CODE.format(canary=str(canary))
    for name in ("evil.py", "modeling_evil.py", "tokenizer.py"):
        (model / name).write_text(code)
    case.spoil(model, canary)
    use = [world.recipe, "--model.actor", model, "--run.dir", folder / "run"]
    words = {
        "check": ["check", *use],
        "train": ["train", *use, "--train.iterations", "1"],
        "generate": ["generate", "1+1=?", "--max-tokens", "2", "--model", model],
    }
    for command in COMMANDS:
        tried = attempt(folder / command, *words[command], sabotage=Tripwire(canary))
        problem = "its wish was granted" if canary.exists() else _wrong_end(tried, case)
        if problem is not None:
            return f"{case.name}: {command}: {problem}"
    return None


def _wrong_end(tried: Attempt, case: Hostile) -> str | None:
    if case.words or tried.code != 0:
        return refused(tried, *case.words)
    return no_traceback(tried)


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _own_config(model: Path, canary: Path) -> None:
    classes = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    _edit(model / "config.json", model_type="evil", auto_map=classes)


def _own_model(model: Path, canary: Path) -> None:
    _edit(model / "config.json", auto_map={"AutoModelForCausalLM": "evil.EvilModel"})
    _edit(model / "generation_config.json", trust_remote_code=True, custom_generate="evil.py")


def _own_tokenizer(model: Path, canary: Path) -> None:
    classes = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    _edit(model / "tokenizer_config.json", auto_map=classes, trust_remote_code=True)


def _local_class(model: Path, canary: Path) -> None:
    _edit(model / "tokenizer_config.json", tokenizer_class="EvilTokenizer")


def _unknown_type(model: Path, canary: Path) -> None:
    _edit(model / "config.json", model_type="evil", architectures=["EvilModel"])


def _hub_adapter(model: Path, canary: Path) -> None:
    _edit(model / "config.json", _name_or_path="somebody/evil")
    adapter = {"base_model_name_or_path": "somebody/evil", "peft_type": "LORA"}
    (model / "adapter_config.json").write_text(json.dumps(adapter))


def _hub_kernel(model: Path, canary: Path) -> None:
    """An attention that is fetched and imported when the model is built."""
    name = "somebody/evil-attention"
    _edit(model / "config.json", attn_implementation=name, _attn_implementation=name)


def _linked_pickle(model: Path, canary: Path) -> None:
    outside = model.parent / "outside.bin"
    outside.write_bytes(Bomb(canary).zipped())
    os.replace(model / "model.safetensors", model.parent / "kept.safetensors")
    (model / "model.safetensors").symlink_to(outside)


def _foreign_shards(name: str) -> Callable[[Path, Path], None]:
    """An index that says the weights are in that file."""

    def spoil(model: Path, canary: Path) -> None:
        weights = load_file(model / "model.safetensors")
        (model / "model.safetensors").unlink()
        save_file(weights, model.parent / "outside.safetensors", metadata={"format": "pt"})
        (model / "evil.bin").write_bytes(Bomb(canary).zipped())
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))

    return spoil


def _template(text: str) -> Callable[[Path, Path], None]:
    return lambda model, canary: (
        (model / "chat_template.jinja").write_text(text.replace("CANARY", str(canary))) and None
    )


HOSTILE = [
    Hostile("config class of its own", _own_config),
    Hostile("model class of its own", _own_model),
    Hostile("tokenizer class of its own", _own_tokenizer),
    Hostile("tokenizer class in a local file", _local_class),
    Hostile("unknown model type", _unknown_type),
    Hostile("adapter of a model on the hub", _hub_adapter, ("adapter",)),
    Hostile("attention kernel on the hub", _hub_kernel, ("kernel",)),
    Hostile("weights linked to a pickle", _linked_pickle),
    Hostile("shards outside", _foreign_shards("../outside.safetensors"), ("outside.safetensors",)),
    Hostile("shards that are pickles", _foreign_shards("evil.bin"), ("evil.bin",)),
    Hostile(
        "template that reaches for classes",
        _template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        ("chat template",),
    ),
    Hostile(
        "template that opens a file",
        _template("{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}"),
        ("chat template",),
    ),
    Hostile("template that fails", _template("{{ 1 // 0 }}"), ("chat template",)),
]
