"""Models from Hugging Face directories and GGUF files; no remote code, no pickle."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import logging

from tether.errors import UserError
from tether.models.cpu_matmul import use_onednn
from tether.models.forward import logits_are_of_head, logits_come_from_head
from tether.models.gguf import dequantized, make_savable, transformers_source
from tether.models.locate import find_model
from tether.models.precision import compute_in
from tether.models.stored import note_places
from tether.models.untrusted import explain_load_errors, refuse_other_weights, refuse_pickle

logging.set_verbosity_error()  # errors in loading are explained in one sentence instead
logging.disable_progress_bar()  # one bar per model would hide the run's own lines

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_causal_lm(
    name: str,
    dtype: str,
    device: torch.device,
    hub: bool = False,
    compute: str = "float32",
    in_parts: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in eval mode: with dropout no two log-probs would agree.

    With `in_parts` its weights stay in their files, where they can be found there one by one
    (`models/stored.py`), until the model is sharded.
    """
    kind, auto = "a causal language model", AutoModelForCausalLM
    model = _load_unread(auto, kind, name, dtype, device, hub) if in_parts else None
    if model is not None and not logits_are_of_head(model):
        model = None  # or not to be seen without numbers
    if model is None:
        model = _load_whole(auto, kind, name, dtype, device, hub)
        _refuse_other_logits(name, model)
    make_savable(model)
    compute_in(model, compute)
    return model


def _refuse_other_logits(name: str, model: PreTrainedModel) -> None:
    if not logits_come_from_head(model):
        raise UserError(
            f"{name} changes its logits after the output head (soft-capping or scaling), which "
            f"tether does not do; choose a model without that."
        )


def load_trunk(
    name: str,
    dtype: str,
    device: torch.device,
    hub: bool = False,
    compute: str = "float32",
    in_parts: bool = False,
) -> PreTrainedModel:
    """Load a model without its head, for a critic: a reward model's directory serves as well.

    `in_parts` is as in `load_causal_lm`.
    """
    kind = "a language model's trunk"
    model = _load_unread(AutoModel, kind, name, dtype, device, hub) if in_parts else None
    if model is None:
        model = _load_whole(AutoModel, kind, name, dtype, device, hub)
    compute_in(model, compute)
    return model


def load_classifier(
    name: str, dtype: str, device: torch.device, compute: str = "float32", **changes: int
) -> tuple[PreTrainedModel, set[str]]:
    """Load a sequence classifier; also return the names of weights that its files do not hold.

    `changes` replace values of config.json, such as `num_labels`.
    """
    auto = AutoModelForSequenceClassification
    model, missing = _load(auto, "a reward model", name, dtype, hub=False, **changes)
    compute_in(model, compute)
    return _move(model, device), missing


def load_on_meta(
    auto: type, name: str, dtype: str, hub: bool = False, compute: str = "float32"
) -> PreTrainedModel:
    """Build a model's shapes without weights, on the `meta` device; a config.json is enough."""
    path = find_model(name, hub)
    with explain_load_errors(name, "a model to plan for"):
        model = _outline(auto, path, dtype).eval()
    compute_in(model, compute)
    return model


def _load_whole(
    auto: type, kind: str, name: str, dtype: str, device: torch.device, hub: bool
) -> PreTrainedModel:
    """Load a model of which every weight must be in the files."""
    model, missing = _load(auto, kind, name, dtype, hub)
    return _move(_prepared(name, model, missing, dtype), device)


def _load_unread(
    auto: type, kind: str, name: str, dtype: str, device: torch.device, hub: bool
) -> PreTrainedModel | None:
    """Load a model whose weights are on `meta`, each with its place in the files.

    None where transformers does more with a file than to read it: a GGUF that it unpacks, weights
    that it renames or puts together, tied ones that are stored twice.
    """
    directory, options = transformers_source(find_model(name, hub))
    if options:
        return None
    model, missing = _load(auto, kind, name, dtype, hub, device_map="meta")
    if not missing and not note_places(model, directory, device):
        return None
    return _prepared(name, model, missing, dtype)


def _prepared(name: str, model: PreTrainedModel, missing: set[str], dtype: str) -> PreTrainedModel:
    if missing:  # transformers leaves them at random
        raise UserError(
            f"{name} holds no {min(missing)}, which its architecture needs; it is incomplete, or "
            f"a model of another kind."
        )
    if dtype == "float64":
        _norm_in_float64(model)
    use_onednn(model)
    return model


def _load(
    auto: Any, kind: str, name: str, dtype: str, hub: bool, **changes: int | str
) -> tuple[PreTrainedModel, set[str]]:
    """Load a model in eval mode, and the names of weights that its files do not hold.

    The only call of `from_pretrained` for a directory's weights.
    """
    path = find_model(name, hub)
    if path.is_dir():
        refuse_pickle(name, path)
        with explain_load_errors(name, kind):
            refuse_other_weights(name, path, _outline(auto, path, dtype))
    directory, options = transformers_source(path)
    if options:
        options |= dequantized()
    # Unpacking a GGUF draws a progress bar that no setting of transformers turns off.
    with redirect_stderr(io.StringIO()), explain_load_errors(name, kind):
        model, info = auto.from_pretrained(
            directory,
            dtype=DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
            **changes,
        )
    if getattr(model, "hf_quantizer", None) is not None:  # set by GGUF; the weights are plain now
        model.hf_quantizer.remove_quantization_config(model)
    weights = [weight for weight in model.parameters() if not weight.is_meta]
    if not all(bool(weight.isfinite().all()) for weight in weights):
        raise UserError(f"{name} holds NaN or infinite weights; it cannot be used.")
    return model.eval(), set(info["missing_keys"])


def _outline(auto: Any, path: Path, dtype: str) -> PreTrainedModel:
    directory, options = transformers_source(path)
    settings = AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, **options
    )
    with torch.device("meta"):
        return auto.from_config(settings, dtype=DTYPES[dtype], trust_remote_code=False)


def _move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    cast(nn.Module, model).to(device)  # transformers' own signature of `to` is not one of a method
    return model


def _norm_in_float64(model: nn.Module) -> None:
    """Replace transformers' RMS norms, which round to float32 inside: too coarse to compare by."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        scale = torch.rsqrt((x**2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * x * scale

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(forward, module)
