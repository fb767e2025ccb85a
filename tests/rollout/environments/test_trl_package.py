"""TRL's environment classes here against TRL's own trainer: ids, masks and rewards, row by row.

TRL is in an environment of its own: TETHER_TRL_PYTHON names its Python.
"""

import json
import os
import subprocess

import pytest

from rollout.talk import settings
from tether.data.chat_templates import offer_tools
from tether.models.vocabulary import Vocabulary, load_tokenizer
from tether.rollout.sampler import Done
from tether.rollout.tools.build import build_episode_source
from tether.rollout.turns import close_all
from tether.types import Prompts

CLASSES = '''
class Counter:
    def reset(self, target, **kwargs) -> str | None:
        self.count, self.target = 0, target
        return None if target == 1 else f" Reach {target}."

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: What to add.

        Returns:
            The counter.
        """
        if self.count == self.target:
            raise ValueError("Game over.")
        self.count += step
        return self.count

    async def double(self, times: int = 1) -> dict:
        """
        Double the counter.

        Args:
            times: How often.
        """
        if times > 3:
            raise RuntimeError("too often")
        self.count *= 2**times
        return {"count": self.count}

    def get_reward(self) -> float:
        return 1.0 - abs(self.target - self.count) / 10
'''

TRAINER = """
import importlib.util, json, sys
from pathlib import Path
import torch, trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

folder = Path(sys.argv[1])
spec = json.loads((folder / "spec.json").read_text())
special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*letters, *special])}, merges=[]))
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
bpe.decoder = decoders.ByteLevel()
bpe.add_special_tokens(special)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
templates = Path(trl.__file__).parent / "chat_templates"
tokenizer.chat_template = (templates / f"{spec['template']}.jinja").read_text()
config = LlamaConfig(vocab_size=len(bpe.get_vocab()), hidden_size=16, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=8192,
    eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
LlamaForCausalLM(config).save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")

module_spec = importlib.util.spec_from_file_location("classes", folder / "classes.py")
classes = importlib.util.module_from_spec(module_spec)
module_spec.loader.exec_module(classes)
rows = [{k: v for k, v in row.items() if k != "turns"} for row in spec["rows"]]
trainer = GRPOTrainer(
    model=str(folder / "model"),
    args=GRPOConfig(output_dir=str(folder / "out"), per_device_train_batch_size=len(rows),
        num_generations=2, max_completion_length=4000, report_to=[], use_cpu=True, max_steps=1,
        bf16=False),
    train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    environment_factory=classes.Counter)
prompts, waiting = [], [list(row["turns"]) for row in spec["rows"]]

def scripted(prompt_ids, *rest, **others):
    if not prompts:
        prompts.extend(list(ids) for ids in prompt_ids)
    which = [next(i for i, p in enumerate(prompts) if list(ids[: len(p)]) == p) for ids in prompt_ids]
    said = [tokenizer(waiting[i].pop(0), add_special_tokens=False).input_ids for i in which]
    return said, None

kept = {}
generate, calculate = trainer._generate, trainer._calculate_rewards
def generated(asked):
    found = generate(asked)
    kept["prompt_ids"], kept["ids"], kept["mask"] = found[:3]
    return found
def calculated(*args):
    found = calculate(*args)
    kept["rewards"] = found.sum(dim=1).tolist()
    return found
trainer._generate_single_turn = scripted
trainer._generate, trainer._calculate_rewards = generated, calculated
trainer._generate_and_score_completions(rows)
(folder / "found.json").write_text(json.dumps(kept))
"""  # noqa: E501


def call(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def row(target, *turns):
    prompt = [{"role": "user", "content": f"Count to {target}."}]
    return {"prompt": prompt, "target": target, "turns": [f"{turn}<|im_end|>" for turn in turns]}


ROWS = [
    row(6, call("increment", step=2), call("double"), f"Now.\n{call('increment', step=1)}", "5"),
    row(3, call("increment", step=3), call("increment", step=1), "Over."),
    row(1, "I do not count."),
    row(
        4,
        "\n".join([call("increment", step=1), call("increment", step=2)]),
        call("double", times=4),
        "Three.",
    ),
]


def episode(source, tokenizer, given):
    """Prompt, ids, mask and reward of a row whose policy says the turns."""
    from tether.data.messages import render_prompt

    ids = render_prompt(tokenizer, given["prompt"])
    columns = {"target": given["target"]}
    [one] = source.episodes(Prompts([""], [ids], [columns], [0], [""], [given["prompt"]]))
    found, mask = [], []
    for turn in given["turns"]:
        said = tokenizer(turn, add_special_tokens=False).input_ids
        assert [one.add_token(token) for token in said][-1]
        found, mask = found + said, mask + [1] * len(said)
        answer = one.answer()
        if not isinstance(answer, Done):
            found, mask = found + answer.ids, mask + [0] * len(answer.ids)
    close_all([one])
    return one.prompt_ids, found, mask, sum(x or 0.0 for x in one.turn_rewards)


@pytest.mark.long
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_instruct_2507"])
def test_episodes_equal_those_of_trls_own_trainer(tmp_path, template):
    """Prompts with tools and the text of `reset`, results, errors, masks and rewards."""
    python = os.environ.get("TETHER_TRL_PYTHON")
    if python is None:
        pytest.skip("TETHER_TRL_PYTHON does not name a Python with TRL")
    (tmp_path / "classes.py").write_text(CLASSES)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "spec.json").write_text(json.dumps({"template": template, "rows": ROWS}))
    command = [python, "-W", "ignore", tmp_path / "trainer.py", tmp_path]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    theirs = json.loads((tmp_path / "found.json").read_text())

    tokenizer = load_tokenizer(str(tmp_path / "model"))
    vocabulary = Vocabulary(tokenizer, frozenset([tokenizer.eos_token_id]))
    arguments = {"class": f"{tmp_path}/classes.py:Counter"}
    section = settings(
        tools=[],
        environment={"kind": "trl", "arguments": arguments},
        max_turns=8,
        max_response_tokens=4000,
        max_observation_tokens=400,
    )
    source = build_episode_source(section, vocabulary)
    for number, given in enumerate(ROWS):
        prompt_ids, ids, mask, reward = episode(source, tokenizer, given)
        assert prompt_ids == theirs["prompt_ids"][number]
        assert tokenizer.decode(ids) == tokenizer.decode(theirs["ids"][number])
        assert ids == theirs["ids"][number]
        assert mask == theirs["mask"][number]
        assert reward == pytest.approx(theirs["rewards"][number])
    offer_tools(tokenizer, None)
