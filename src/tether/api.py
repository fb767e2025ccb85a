"""What the commands call, and a notebook can call: train, resume, evaluate, generate, trace, …

`watch` is an object with the methods of `train.watch.Watcher`; `resume` continues a run that is at
`run.dir` already; `allow_changed` does so although config, data, model or torch changed.
"""

import contextlib
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tether.config import Config, RolloutSection
from tether.config.load import load_config, read_recipe, validate_config
from tether.config.stages import PipelineConfig, RewardModelConfig, SFTConfig
from tether.data.chat_templates import fix_date
from tether.data.messages import render_prompt, without_chat_template
from tether.data.probe import read_probe
from tether.data.prompts import OnProgress
from tether.errors import UserError
from tether.explain.trace import Trace, trace_prompt
from tether.explain.trace_setup import is_ppo_run
from tether.models.loading import load_causal_lm
from tether.models.policy import Policy
from tether.models.vocabulary import Vocabulary, load_vocabulary
from tether.planning.plan import Plan
from tether.planning.preview import preview
from tether.ppo.evaluate import NOTHING_HELD_OUT, Evaluation, build_endpoint_evaluation
from tether.ppo.evaluate import evaluate as evaluate_roles
from tether.ppo.evaluate import evaluate_endpoint as evaluate_at_endpoint
from tether.ppo.probe import PROBE_TEMPERATURE, ProbeResult, run_probe
from tether.ppo.roles import build_roles, pick_device
from tether.ppo.scoring import response_texts
from tether.rewards.functions import Reward
from tether.rollout.local import LocalSampler
from tether.rollout.openai import OpenAIEngine
from tether.rollout.sampler import Draw, Greedy
from tether.rollout.tools.build import build_episode_source
from tether.run.checkpoint_store import latest_checkpoint
from tether.run.compare import Comparison, compare_runs
from tether.run.directory import CONFIG, RECIPE, RUNS, is_pipeline, is_run, refuse_taken
from tether.run.doctor.diagnosis import examine
from tether.run.doctor.findings import Diagnosis
from tether.run.reader import find_runs
from tether.run.trust import SECTIONS, refuse_untrusted
from tether.stages.reward_model import reward_model_job
from tether.stages.rlhf import PipelineWatcher, Report, run_pipeline
from tether.stages.sft import sft_job
from tether.stages.training import Record
from tether.train.checkpoint import load_learnt_part, load_plain_actor
from tether.train.export import export_run
from tether.train.fingerprint import refuse_lost_reward
from tether.train.ppo import PPOJob
from tether.train.session import start as start_session
from tether.train.stepping import Run
from tether.train.training import Result
from tether.train.watch import Watcher
from tether.types import CUT_OFF, Prompts

MAX_TOKENS = 64  # of a response, where nobody says
PROBE_TOKENS = 4096  # of a probe's forward pass
ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]


def train(
    config: ConfigLike,
    reward: Reward | None = None,
    watch: Watcher[Evaluation] | None = None,
    resume: bool = False,
    allow_changed: bool = False,
) -> Result[Evaluation]:
    """Train as `tether train` does. `reward` is a plain function, used instead of `reward.kind`.

    With `resume`, a run that is already at `run.dir` goes on instead of being refused.
    """
    config, watch = as_config(config), watch or Watcher[Evaluation]()
    _refuse_unnamed_resume(config.run.dir, resume)
    return start_session(PPOJob(config, reward), watch, resume, allow_changed)


def start(
    config: ConfigLike,
    reward: Reward | None = None,
    watch: Watcher[Evaluation] | None = None,
    resume: bool = False,
    allow_changed: bool = False,
) -> Run:
    """Open a run to be stepped: `for iteration in run:`.

    It is the run that `train` makes, byte for byte; between two iterations it waits for the caller.
    The arguments are those of `train`.

    >>> small = {"rollout.prompts": 4, "actor.minibatch_rows": 8, "data.heldout": None}
    >>> config = tether.load_config("arithmetic", {**small, "train.iterations": 9, "threads": 1})
    >>> run = tether.start(config, reward=lambda response: -len(response))
    >>> for iteration in run:
    ...     print(iteration.number, len(iteration.responses), "score/mean" in iteration.metrics)
    ...     if iteration.number == 1:
    ...         run.stop()
    0 8 True
    1 8 True
    """
    config = as_config(config)
    _refuse_unnamed_resume(config.run.dir, resume)
    return Run(PPOJob(config, reward), watch or Watcher[Evaluation](), resume, allow_changed)


def resume(
    run: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    reward: Reward | None = None,
    watch: Any = None,
    allow_changed: bool = False,
) -> Result[Any] | Report:
    """Go on exactly where a run of any kind stopped; one that is finished is left as it is.

    `watch` is what the function of that kind takes. A run of three stages returns a `Report`.
    """
    run = Path(run)
    stage, recipe = stage_of(run), recipe_of(run)
    overrides = {**(overrides or {}), "run.dir": str(run)}
    match stage:
        case "sft":
            return sft(load_config(recipe, overrides, SFTConfig), watch, True, allow_changed)
        case "reward-model":
            config = load_config(recipe, overrides, RewardModelConfig)
            return reward_model(config, watch, True, allow_changed)
        case "rlhf":
            return rlhf(load_config(recipe, overrides, PipelineConfig), watch, True, allow_changed)
    return train(load_config(recipe, overrides), reward, watch, True, allow_changed)


def recipe_of(run: Path) -> Path:
    """Return the file that holds a run's settings."""
    if is_pipeline(run):
        return run / RECIPE
    if not is_run(run):
        raise UserError(f"{run} is not a run: there is no {CONFIG} in it.")
    return run / CONFIG


def stage_of(run: Path) -> str | None:
    """Return which stage a run is of: sft, reward-model, rlhf for all three, None for PPO."""
    return read_recipe(recipe_of(run)).get("stage")


def check(
    config: ConfigLike, reward: Reward | None = None, reading: OnProgress | None = None
) -> Plan:
    """Load and validate everything that a run needs; train nothing, write nothing. Weights that
    are not here or do not fit are planned for by their model's config.json."""
    config = as_config(config)
    refuse_taken(config.run.dir, config.run.overwrite)
    return preview(config, reward, reading)


def evaluate(
    model: str,
    recipe: str | os.PathLike[str] = "arithmetic",
    overrides: Mapping[str, Any] | None = None,
    reward: Reward | None = None,
    trust_run: bool = False,
) -> Evaluation:
    """Score a run's newest checkpoint, or a model directory, on a recipe's held-out prompts.

    A run of PPO brings its own recipe; one of `tether sft` has no task, so the recipe is `recipe`.
    `reward` is a plain function, used instead of `reward.kind`; a run that was trained with one
    needs it. With `trust_run`, Python files and addresses that a run's config names are used.
    """
    run = Path(model) if is_ppo_run(Path(model)) else None
    recipe = recipe if run is None else run / CONFIG
    began = load_config(recipe).model
    on_base = run is not None and began.learns_in_part
    changes = {} if on_base else {"model.actor": str(model_path(model))}
    if run is not None and not on_base:  # KL is measured against what the run began with
        changes["model.reference"] = began.reference or began.actor
    config = load_config(recipe, {**changes, **(overrides or {})})
    if run is not None and not trust_run:
        used = ("model", "rollout") if reward is not None else SECTIONS
        refuse_untrusted(run, config.to_dict(), used, typed=[*(overrides or {})])
    if run is not None and reward is None:
        refuse_lost_reward(run, overrides or {})
    torch.set_num_threads(config.threads)
    roles = build_roles(config, reward)
    try:
        if run is not None and on_base:
            load_learnt_part(latest_checkpoint(run), roles, config)
        if roles.heldout_prompts is None:
            raise UserError(NOTHING_HELD_OUT)
        sets = roles.heldout_prompts.first(config.train.eval_prompts)
        done = 0 if run is None else int(latest_checkpoint(run).name)
        evaluation, _ = evaluate_roles(done, sets, roles, config, config.train.price_samples > 0)
        return evaluation
    finally:
        roles.reward.close()


def evaluate_endpoint(
    url: str,
    name: str,
    model: str | None = None,
    recipe: str | os.PathLike[str] = "arithmetic",
    overrides: Mapping[str, Any] | None = None,
    reward: Reward | None = None,
    key: str | None = None,
) -> Evaluation:
    """Score what an OpenAI-compatible server calls `name` on a recipe's held-out prompts.

    `model` is where its tokenizer lies, if not at the recipe's `model.actor`; no weights are read.
    """
    changes = {} if model is None else {"model.actor": str(model_path(model))}
    config = load_config(recipe, {**changes, **(overrides or {})})
    here = build_endpoint_evaluation(config, reward)
    try:
        return evaluate_at_endpoint(OpenAIEngine(url, name, here.vocabulary, key=key), here, config)
    finally:
        here.reward.close()


def probe(model: str, folder: str = "tether:probe", trust_run: bool = False) -> ProbeResult:
    """Ask a run's newest actor, or a model, what a probe's files hold: facts, text, questions."""
    questions = read_probe(folder)
    network, vocabulary = load_plain(model, trust_run)
    fix_date(vocabulary.tokenizer, _recorded_day(model))
    return run_probe(questions, Policy(network.eval(), PROBE_TEMPERATURE, PROBE_TOKENS), vocabulary)


class Talker:
    """A loaded model that answers prompts."""

    def __init__(
        self,
        model: str,
        max_tokens: int | None = None,
        system_prompt: str | None = None,
        trust_run: bool = False,
    ) -> None:
        settings = _rollout_settings(model, trust_run)
        self.model, self.vocabulary = load_plain(model, trust_run)
        fix_date(self.vocabulary.tokenizer, _recorded_day(model))
        self.episodes = build_episode_source(settings, self.vocabulary).episodes
        # What tools say counts as well, so that a run with tools needs its own limit.
        usual = settings.max_response_tokens if settings.is_multi_turn else MAX_TOKENS
        self.max_tokens = max_tokens or usual
        self.system_prompt = system_prompt
        self.tokenizer = self.vocabulary.tokenizer
        if _recorded_data(model).get("chat_template") is False:  # as the run read its prompts
            self.tokenizer = without_chat_template(self.tokenizer)

    def respond(
        self, prompt: str, samples: int = 1, temperature: float = 0.0, seed: int = 0
    ) -> list[tuple[str, bool]]:
        """Responses and whether each ended by itself; temperature 0 is greedy."""
        if not prompt.strip():
            raise UserError("The prompt is empty; write something to respond to.")
        ids = render_prompt(self.tokenizer, prompt, self.system_prompt)
        if not ids:
            raise UserError("The prompt has no tokens: the model's tokenizer drops all of it.")
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and len(ids) + self.max_tokens > context:
            raise UserError(
                f"The prompt's {len(ids)} tokens and {self.max_tokens} for the response are more "
                f"than the model's {context} positions; shorten it or lower --max-tokens."
            )
        sampler = LocalSampler(self.vocabulary.eos_ids, self.max_tokens, temperature or 1.0)
        sampler.sync(self.model, 0)
        choice = Draw(seed, "generate", 0) if temperature > 0 else Greedy()
        asked = Prompts([prompt], [ids], [{}], [0], [""], [None])
        rollout = sampler.run(self.episodes(asked.repeat(samples)), choice)
        texts = response_texts(rollout, self.vocabulary)
        finished = [reason not in CUT_OFF for reason in rollout.finish_reasons]
        return list(zip(texts, finished, strict=True))


def _recorded_day(model: str) -> datetime.date | None:
    """Return the day that a run's chat template was told, if it asked for one."""
    with contextlib.suppress(ValueError):
        return datetime.date.fromisoformat(str(_recorded_data(model).get("date")))
    return None


def _recorded_data(model: str) -> Mapping[str, Any]:
    """Return the section `data` of a run's config; of another model, nothing."""
    data = read_recipe(Path(model) / CONFIG).get("data") if is_run(Path(model)) else None
    return data if isinstance(data, dict) else {}


def _rollout_settings(model: str, trust_run: bool) -> RolloutSection:
    """A run goes on with the tools it was trained with; another model has none."""
    if not is_run(Path(model)):
        return RolloutSection()
    settings = validate_config(read_recipe(Path(model) / CONFIG).get("rollout", {}), RolloutSection)
    if not trust_run:
        refuse_untrusted(Path(model), {"rollout": settings.model_dump(mode="json")}, ["rollout"])
    return settings


def generate(
    prompt: str,
    model: str | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    max_tokens: int | None = None,
    seed: int = 0,
    trust_run: bool = False,
) -> list[str]:
    """The responses of a run or model directory (default: the newest run) to one prompt.

    With `trust_run`, tools of one's own and addresses that a run's config names are used.
    """
    talker = Talker(pick_model(model), max_tokens, trust_run=trust_run)
    return [text for text, _ in talker.respond(prompt, samples, temperature, seed)]


def pick_model(model: str | None) -> str:
    """The one named; else the newest run with a checkpoint; else the starter."""
    if model is not None:
        return model
    saved = [run for run in find_runs(RUNS) if (run / "checkpoints" / "LATEST").is_file()]
    return str(max(saved, key=lambda run: run.stat().st_mtime)) if saved else "tether:starter"


def load_plain(model: str, trust_run: bool = False) -> tuple[PreTrainedModel, Vocabulary]:
    """A run's newest actor, or the model of that name, ready to respond."""
    device = pick_device("auto")
    if is_run(Path(model)):
        checkpoint = latest_checkpoint(Path(model))
        if not (checkpoint / "actor").is_dir():  # a part, on the base of the run's config
            config = load_config(Path(model) / CONFIG)
            if not trust_run:
                refuse_untrusted(Path(model), config.to_dict(), ["model"])
            return load_plain_actor(checkpoint, config, "float32", device)
        model = str(checkpoint / "actor")  # whichever stage it is a run of
    network = load_causal_lm(model, "float32", device)
    return network, load_vocabulary(model, network)


def export(
    run: str | os.PathLike[str], directory: str | os.PathLike[str], trust_run: bool = False
) -> Path:
    """Write a run's newest actor as a Hugging Face directory with a model card."""
    run, directory = Path(run), Path(directory)
    if not is_run(run):
        raise UserError(f"{run} is not a run: there is no {CONFIG} in it.")
    config = load_config(run / CONFIG)
    if config.model.learns_in_part and not trust_run:  # the base is loaded from where it was
        refuse_untrusted(run, config.to_dict(), ["model"])
    return export_run(run, config, directory)


def diff(left: str | os.PathLike[str], right: str | os.PathLike[str]) -> Comparison:
    """Put two runs side by side: settings that differ, metrics, held-out scores."""
    for run in (left, right):
        if not Path(run).is_dir():
            raise UserError(f"{run} is not a folder; name a run, `tether runs` lists them.")
    return compare_runs(Path(left), Path(right))


def doctor(run: str | os.PathLike[str]) -> Diagnosis:
    """Say what is wrong with a run and what to change, as `tether doctor` does."""
    return examine(Path(run))


def model_path(model: str) -> str | Path:
    """Where the weights are: a run's newest checkpoint, or the name itself."""
    return latest_checkpoint(Path(model)) / "actor" if is_run(Path(model)) else model


def as_config(config: ConfigLike) -> Config:
    """A Config, a mapping of sections, a shipped recipe's name, or the path of a YAML file."""
    if isinstance(config, Config):
        return config
    return validate_config(config) if isinstance(config, Mapping) else load_config(config)


def trace(
    prompt: str,
    model: str | None = None,
    response: str | None = None,
    columns: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    reward: Reward | None = None,
    trust_run: bool = False,
) -> Trace:
    """One prompt through every stage, as `tether trace` sends it; keys: `explain/trace.py`.

    The record is a dict, which a notebook shows as tables.
    With `trust_run`, Python files and addresses that a run's config names are used.
    """
    return trace_prompt(pick_model(model), prompt, response, columns, overrides, reward, trust_run)


def sft(
    config: SFTConfig | Mapping[str, Any],
    watch: Watcher[Record] | None = None,
    resume: bool = False,
    allow_changed: bool = False,
) -> Result[Record]:
    """Train on demonstrations as `tether sft` does."""
    config = config if isinstance(config, SFTConfig) else validate_config(config, SFTConfig)
    _refuse_unnamed_resume(config.run.dir, resume)
    return start_session(sft_job(config), watch or Watcher(), resume, allow_changed)


def reward_model(
    config: RewardModelConfig | Mapping[str, Any],
    watch: Watcher[Record] | None = None,
    resume: bool = False,
    allow_changed: bool = False,
) -> Result[Record]:
    """Train a reward model on preferences as `tether reward-model` does."""
    if not isinstance(config, RewardModelConfig):
        config = validate_config(config, RewardModelConfig)
    _refuse_unnamed_resume(config.run.dir, resume)
    return start_session(reward_model_job(config), watch or Watcher(), resume, allow_changed)


def rlhf(
    config: PipelineConfig | Mapping[str, Any],
    watch: PipelineWatcher | None = None,
    resume: bool = False,
    allow_changed: bool = False,
) -> Report:
    """Run SFT, a reward model and PPO in a row as `tether train rlhf` does."""
    if not isinstance(config, PipelineConfig):
        config = validate_config(config, PipelineConfig)
    _refuse_unnamed_resume(config.run.dir, resume)
    return run_pipeline(config, watch or PipelineWatcher(), resume, allow_changed)


def _refuse_unnamed_resume(run: Path | None, resume: bool) -> None:
    if resume and run is None:
        raise UserError("To resume, say which run: --run.dir RUN, or `tether resume RUN`.")
