"""Random models small enough to make on the spot: the architectures the local engine runs.

make_tiny_model(folder, "llama")       a Hugging Face folder, with tokenizer and chat template
make_tiny_adapter(model, folder)       a LoRA adapter for that model, as peft saves one
"""

from pathlib import Path
from typing import Any, Literal

from tests.conftest import CHAT_TEMPLATE, make_tokenizer

Kind = Literal["llama", "qwen2", "qwen3"]
KINDS: tuple[Kind, ...] = ("llama", "qwen2", "qwen3")
WINDOW = 512
END = "<|im_end|>"

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "initializer_range": 0.2,  # with the usual 0.02 a tiny model says the same token for ever
}


def make_tiny_model(folder: Path, kind: Kind, *, seed: int = 0, **shape: Any) -> Path:
    """Write a random model with its tokenizer to `folder`; the same weights for the same seed."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    make_tokenizer(folder, pattern=None)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END)
    config = _config(kind, vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    return folder


def make_tiny_adapter(model_folder: Path, folder: Path, *, seed: int = 0, rank: int = 4) -> Path:
    """Write a random LoRA adapter for the model in `model_folder`; it changes what is said."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero as peft makes it, so that a new adapter changes nothing
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return folder


def _config(kind: Kind, **values: Any) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    classes: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    head = {"head_dim": 32} if kind == "qwen3" else {}  # not hidden / heads, as in the real ones
    return classes[kind](**{**SHAPE, **head, "tie_word_embeddings": kind != "llama", **values})
