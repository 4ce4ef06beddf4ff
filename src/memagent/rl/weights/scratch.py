"""A small model with random weights, for experiments, and a tokenizer trained on its texts.

    texts ──▶ byte pairs ──▶ tokenizer.json  ┐
    settings, seed ──▶ random Llama          ├──▶ a Hugging Face folder like any other
    roles ──▶ chat template, end of a turn   ┘

    folder = build_scratch(ScratchSettings(hidden_size=128), texts, Path("model"), seed=0)
    load(str(folder))

Any text can be encoded: what no byte pair covers is encoded as bytes. Each digit is a token, so that all
numbers use the same ten tokens. Texts cannot contain a role mark: the chat template splits what looks like
one. The same arguments give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from memagent.engines.local.loading import quietly

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from memagent.rl.settings import ScratchSettings

ROLES = ("system", "user", "assistant")
END = "<|end|>"
MARKS = (*(f"<|{role}|>" for role in ROLES), END)
MIN_FREQUENCY = 2
"""Byte pairs must occur this often to become a token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content | replace('<|', '< |') }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# A word with the space before it, one digit, punctuation, or white space.
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build_scratch(
    settings: ScratchSettings, texts: Iterable[str], folder: Path, *, seed: int
) -> Path:
    """Write the model and its tokenizer to a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with quietly():
        _save_tokenizer(_trained(texts, settings.vocab_size), folder, window=settings.window)
        _save_model(settings, folder, seed=seed)
    return folder


def _trained(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer trained on texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, *, window: int) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=window,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _save_model(settings: ScratchSettings, folder: Path, *, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.window,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,  # the embedding of a pad token is never trained
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end)
    model.save_pretrained(folder)
