"""Checkpoints: staged beside their place, hashed, then moved there by one rename.

checkpoints/000050/actor/           an ordinary Hugging Face directory with its tokenizer
checkpoints/000050/critic.safetensors
checkpoints/000050/state.json
checkpoints/000050/manifest.json    SHA-256 of every file, written last
checkpoints/LATEST                  the name of the newest
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_model

from tether.models.critic import Critic
from tether.run.directory import CHECKPOINTS, LATEST, SCHEMA
from tether.train.controls import Controls
from tether.train.roles import Roles


def save_checkpoint(
    run: Path, iterations_done: int, controls: Controls, roles: Roles, keep: int
) -> Path:
    """Write the state after `iterations_done` iterations; an existing one is left as it is."""
    folder = run / CHECKPOINTS
    place = folder / f"{iterations_done:06d}"
    if place.exists():
        return place
    staged = folder / f".staged-{place.name}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)

    roles.actor.model.save_pretrained(staged / "actor")
    roles.vocabulary.tokenizer.save_pretrained(staged / "actor")
    if isinstance(roles.critic, Critic):
        save_model(roles.critic, str(staged / "critic.safetensors"))
    state = {"schema": SCHEMA, "iterations_done": iterations_done, **asdict(controls)}
    (staged / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
    _write_manifest(staged)

    os.rename(staged, place)
    _sync(folder)
    _point_latest(folder, place.name)
    _prune(folder, keep)
    return place


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    hashes = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    manifest = folder / "manifest.json"
    manifest.write_text(
        json.dumps({"schema": SCHEMA, "sha256": hashes}, indent=1) + "\n", encoding="utf-8"
    )
    _sync(manifest)
    _sync(folder)


def _point_latest(folder: Path, name: str) -> None:
    staged = folder / f".{LATEST}"
    staged.write_text(name + "\n", encoding="utf-8")
    _sync(staged)
    os.replace(staged, folder / LATEST)
    _sync(folder)


def _prune(folder: Path, keep: int) -> None:
    complete = sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdigit())
    for old in complete[:-keep]:
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
