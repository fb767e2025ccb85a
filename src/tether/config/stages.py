"""The settings of the two stages before PPO, and of a recipe that runs all three. No torch.

As in `config`, sections are frozen, unknown keys are errors, and all is validated once.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tether.config import TOO_COARSE_TO_LEARN, Decay, RunConfig, Section, Share
from tether.config.run import Compute, LaunchSection, refuse_coarse_compute


class StageRunSection(Section):
    """Where a stage writes."""

    dir: Path | None = None
    """the run directory itself; without it runs/NAME-001, -002, …"""
    name: Annotated[str, Field(pattern=r"^[^/\\.][^/\\]*$")] | None = None
    """the NAME in runs/NAME-001; default: the stage's"""
    overwrite: bool = False
    """replace an earlier run at `run.dir`"""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """who gets a copy of the numbers, each by a process that only reads the run's files"""


class StageModelSection(Section):
    """The network that learns."""

    start: str
    """what training starts from: a local Hugging Face directory, or `tether:starter`"""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """format of the stored weights; bfloat16 is refused, as all of them are trained"""
    compute: Compute = "float32"
    """number format of products and activations, whatever the weights are stored in"""

    @model_validator(mode="after")
    def _fine_enough(self) -> StageModelSection:
        if self.dtype == TOO_COARSE_TO_LEARN:
            raise ValueError(
                "dtype is bfloat16, in which a weight that learns loses most steps to rounding (at "
                "a learning rate of 1e-6, 99 of 100 never move); write float32, with compute: "
                "bfloat16 for speed"
            )
        refuse_coarse_compute(self.compute, "dtype", self.dtype)
        return self


class ConversationSection(Section):
    """Rows with `messages`, or with a prompt and a response."""

    train: str
    """path of the training rows"""
    heldout: str | None = None
    """path of the rows for evaluation only"""
    messages_column: str = "messages"
    """the column that holds a conversation; a row without it needs the two below"""
    prompt_column: str = "prompt"
    """the column that holds the prompt"""
    response_column: str = "response"
    """the column that holds the response to train on: text, or a list of what the model wrote, what
    it read from a tool, what it wrote, …"""
    system_prompt: str | None = None
    """a system turn before every prompt; needs a chat template"""
    date: datetime.date | None = None
    """the day that a chat template is told, YYYY-MM-DD; default: that on which the run starts"""
    max_tokens: PositiveInt = 1024
    """a longer row is refused before training, by line"""


class PreferenceSection(Section):
    """Rows with a prompt, the response that was chosen and the one that was rejected."""

    train: str
    """path of the training pairs"""
    heldout: str | None = None
    """path of the pairs for evaluation only"""
    prompt_column: str = "prompt"
    """the column that holds the prompt; may be absent where the other two are conversations"""
    chosen_column: str = "chosen"
    """the column that holds the better response: text, or messages"""
    rejected_column: str = "rejected"
    """the column that holds the worse response"""
    system_prompt: str | None = None
    """a system turn before every prompt; needs a chat template"""
    date: datetime.date | None = None
    """the day that a chat template is told, YYYY-MM-DD; default: that on which the run starts"""
    max_tokens: PositiveInt = 1024
    """a longer row is refused before training, by line"""


class StageTrainSection(Section):
    """How the rows are trained on. An iteration of these stages is one optimizer step."""

    passes: PositiveFloat = 1.0
    """passes over the rows"""
    minibatch_rows: PositiveInt = 64
    """rows, or pairs, per optimizer step"""
    microbatch_tokens: PositiveInt = 16_384
    """padded tokens per backward pass; changes memory, and results only by rounding"""
    lr: PositiveFloat = 2e-5
    """learning rate at its peak; it falls to zero along a cosine"""
    warmup_share: Share = 0.05
    """share of the steps in which it rises to the peak"""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Adam's decay rates; a short memory suits a loss that falls fast"""
    eps: PositiveFloat = 1e-8
    """Adam's smallest denominator"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay"""
    max_grad_norm: PositiveFloat = 1.0
    """the gradient is clipped to this norm"""
    eval_every: NonNegativeInt = 0
    """evaluate every so many steps, besides before and after; 0 = never"""
    eval_rows: PositiveInt = 512
    """held-out rows per evaluation, from the top of the file"""
    checkpoint_every: NonNegativeInt = 50
    """save every so many steps, besides at the end and on a signal; 0 = never"""
    keep_last: PositiveInt = 2
    """how many of the newest checkpoints to keep"""


class SFTConfig(RunConfig):
    """One run of `tether sft`."""

    stage: Literal["sft"] = "sft"
    """which command the file is for"""
    run: StageRunSection = StageRunSection()
    model: StageModelSection
    data: ConversationSection
    train: StageTrainSection = StageTrainSection()
    launch: LaunchSection = LaunchSection()


class RewardModelConfig(RunConfig):
    """One run of `tether reward-model`."""

    stage: Literal["reward-model"] = "reward-model"
    """which command the file is for"""
    run: StageRunSection = StageRunSection()
    model: StageModelSection
    data: PreferenceSection
    train: StageTrainSection = StageTrainSection()
    launch: LaunchSection = LaunchSection()


class TaskSection(Section):
    """How many rows of the generated preference task to draw (`tasks/courtesy.py`)."""

    demonstrations: PositiveInt = 3000
    """questions with a response, for SFT"""
    questions: PositiveInt = 4000
    """questions alone, for PPO"""
    pairs: PositiveInt = 4000
    """comparisons of two sampled responses, for the reward model"""
    heldout: PositiveInt = 500
    """rows of each kind that only evaluation uses"""
    max_response_tokens: PositiveInt = 32
    """a sampled response that has not ended by then is truncated, in every stage"""
    noise: PositiveFloat = 0.5
    """difference in true utility at which the worse of two is chosen 27 times in a hundred"""


class PipelineConfig(RunConfig):
    """All three stages on a generated preference task, one after the other: `tether train rlhf`.

    The stages' sections leave out what the pipeline fills in: directories, data, and the models
    that one stage hands to the next.
    """

    stage: Literal["rlhf"] = "rlhf"
    """which command the file is for"""
    run: StageRunSection = StageRunSection()
    task: TaskSection = TaskSection()
    start: str = "tether:starter"
    """the model that SFT starts from"""
    sft: dict[str, Any] = Field(default_factory=dict)
    """sections of `tether sft`"""
    reward_model: dict[str, Any] = Field(default_factory=dict)
    """sections of `tether reward-model`"""
    ppo: dict[str, Any] = Field(default_factory=dict)
    """sections of `tether train`"""
