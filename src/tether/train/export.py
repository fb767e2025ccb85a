"""A run's actor as an ordinary Hugging Face directory, with a model card that says what it is."""

import re
import shutil
from pathlib import Path

import yaml
from safetensors import SafetensorError
from transformers import PreTrainedModel

from tether import __version__
from tether.config import Config
from tether.errors import UserError
from tether.models.saving import save_tokenizer
from tether.models.vocabulary import Vocabulary
from tether.ppo.estimates import Estimate
from tether.ppo.evaluate import Evaluation, read_evaluations
from tether.ppo.roles import pick_device
from tether.run.checkpoint_store import follow_umask, latest_checkpoint
from tether.train.checkpoint import load_plain_actor

CARD = "README.md"
SECRET = re.compile(r"(?i)(api_?key|passw(or)?d|secret|credentials?|(api|auth|access|hf)_?token)$")
SETTINGS = "tether.yaml"  # the run's config, under a name that makes the directory no run


def export_run(run: Path, config: Config, directory: Path) -> Path:
    """Write the directory, whole or not at all: it is staged beside its place and renamed."""
    if directory.exists():
        raise UserError(f"{directory} exists already; name a directory that does not.")
    checkpoint = latest_checkpoint(run)
    model, vocabulary = load_plain_actor(
        checkpoint, config, config.model.dtype, pick_device(config.device)
    )
    _answer_alike(model, vocabulary)
    staged = directory.with_name(f".staged-{directory.name}")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)
        model.save_pretrained(staged)
        save_tokenizer(vocabulary.tokenizer, staged)
        card = model_card(int(checkpoint.name), config, read_evaluations(run))
        (staged / CARD).write_text(card, encoding="utf-8")
        (staged / SETTINGS).write_text(shared_settings(config), encoding="utf-8")
        follow_umask(staged)
        staged.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        reason = (getattr(error, "strerror", None) or str(error)).lower().removesuffix(".")
        raise UserError(f"{directory} could not be written: {reason}.") from None
    return directory


def shared_settings(config: Config) -> str:
    """Return the config for others to read, without secrets among a reward's arguments."""
    sections = config.to_dict()
    for reward in (sections["reward"], *(sections["reward"]["parts"] or ())):
        for name, value in reward["arguments"].items():
            if isinstance(value, str) and SECRET.search(name):
                reward["arguments"][name] = "(left out of the export)"
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def _answer_alike(model: PreTrainedModel, vocabulary: Vocabulary) -> None:
    """Set `generate` to end a response where training did, and to pad without asking."""
    ends = sorted(vocabulary.eos_ids)
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    if model.generation_config.pad_token_id is None:
        pad = vocabulary.tokenizer.pad_token_id
        model.generation_config.pad_token_id = ends[0] if pad is None else pad


def model_card(iterations: int, config: Config, evaluations: list[Evaluation]) -> str:
    """Return a model card with the facts of the run directory, and nothing else."""
    found = {evaluation.iteration: evaluation for evaluation in evaluations}
    facts = {
        "base model": f"`{config.model.actor}`",
        "recipe": f"`{config.run.name}`; every setting is in `{SETTINGS}`",
        "iterations": f"{iterations} of {config.rows} responses each",
        "method": _method(config),
        "reward": f"`{config.reward.label}`",
        "KL to the reference": _kl(found.get(iterations)),
        "number format": config.model.dtype,
        "written by": f"tether {__version__}",
    }
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [tether, ppo]",
        "---",
        "",
        f"# {config.run.name}",
        "",
        "Trained by reinforcement learning from the base model below.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {fact} |" for name, fact in facts.items()),
        "",
        *_scores(found.get(0), found.get(iterations)),
    ]
    return "\n".join(lines)


def _method(config: Config) -> str:
    lora = config.model.lora
    trained = f"a LoRA adapter of rank {lora.rank}, merged" if lora else "all weights"
    if config.model.learn_layers is not None:
        which = config.model.learn_layers
        layers = f"layers {which}" if isinstance(which, str) else f"the top {which} layers"
        trained = f"{trained}, on {layers}" if lora else layers
    return f"{config.actor.update.kind} with {config.advantage.estimator} advantages; {trained}"


def _kl(after: Evaluation | None) -> str:
    if after is None or after.kl is None:
        return "not measured"
    return f"{after.kl:.4f} nats per response"


def _scores(before: Evaluation | None, after: Evaluation | None) -> list[str]:
    if before is None or after is None:
        return ["This model was not evaluated on held-out prompts.", ""]
    return [
        f"Mean score on {after.greedy.count} held-out prompts, with 95% intervals:",
        "",
        "| | before | after |",
        "| --- | --- | --- |",
        f"| greedy | {_interval(before.greedy)} | {_interval(after.greedy)} |",
        f"| sampled | {_interval(before.sampled)} | {_interval(after.sampled)} |",
        "",
    ]


def _interval(score: Estimate) -> str:
    if not score.has_interval:  # one score that is neither 0 nor 1
        return f"{score.mean:.3f} (no interval)"
    return f"{score.mean:.3f} ({score.low:.3f} to {score.high:.3f})"
