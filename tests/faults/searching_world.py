"""A small run whose policy always searches: a model that knows only which token follows which."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TAGS = ["<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"]
# What follows what: a search of "k", and after its result another one or an answer.
FOLLOWS = {
    "?": {"<search>": 9.0},
    "<search>": {"k": 9.0},
    "k": {"</search>": 9.0},
    "</information>": {"<search>": 6.0, "<answer>": 6.0},
    "<answer>": {"7": 9.0},
    "7": {"</answer>": 9.0},
}
ROWS = 8
EOS_ID = 256  # after the bytes


@dataclass(frozen=True)
class SearchingWorld:
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def recipe(self, name: str, tool: dict) -> Path:
        """A recipe of two iterations with this search tool."""
        path = self.folder / f"{name}.yaml"
        mapping = {
            "threads": 1,
            "run": {"rollouts_every": 1},
            "model": {"actor": str(self.model)},
            "data": {"train": str(self.folder / "train.jsonl")},
            "rollout": {
                "prompts": ROWS // 2,
                "samples_per_prompt": 2,
                "max_response_tokens": 160,
                "max_turns": 3,
                "max_observation_tokens": 64,
                "tools": [{"kind": "search", **tool}],
                "max_failed_share": 1,  # what a hostile server does is looked at row by row
            },
            "reward": {"kind": "search_answer"},
            "actor": {"lr": 1e-5, "minibatch_rows": 8},
            "train": {"iterations": 2},
        }
        path.write_text(yaml.safe_dump(mapping))
        return path


def make_searching_world(folder: Path) -> SearchingWorld:
    folder.mkdir(parents=True, exist_ok=True)
    world = SearchingWorld(folder)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(world.model)
    _model(tokenizer).save_pretrained(world.model)
    rows = [{"prompt": f"{i}?", "ground_truth": "7"} for i in range(ROWS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return world


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    assert tokenizer.token_to_id("<|end|>") == EOS_ID
    tokenizer.add_tokens(TAGS)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """No layer adds anything to the embedding, so the head sees the last token alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    layer, embedding = model.model.layers[0], model.model.embed_tokens.weight
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embedding.copy_(torch.nn.functional.normalize(torch.randn(embedding.shape), dim=1) * 8)
        model.lm_head.weight.zero_()
        for token, following in FOLLOWS.items():
            seen = embedding[tokenizer.convert_tokens_to_ids(token)]
            for other, logit in following.items():
                # After the norm a state has length 8: this logit, and little for other tokens.
                row = model.lm_head.weight[tokenizer.convert_tokens_to_ids(other)]
                row += 1.5 * logit * seen / 64
    return model
