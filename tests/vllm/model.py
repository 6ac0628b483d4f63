"""Makes a tiny Llama with random weights, its tokenizer, and a LoRA adapter for it. Run by vLLM's own Python.

``python tests/vllm/model.py DIR``: ``DIR/tiny`` (0.4 million parameters) and ``DIR/lora``. The initialiser's range and
the untied embeddings matter: with the defaults the model answers one token for ever, and a broken KV transfer would go
unseen.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, RANK = 128, 4, 2, 32, 2, 8
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def make_tokenizer(directory: Path) -> None:
    """A byte-level BPE of 512 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def make_model(directory: Path) -> None:
    """The model itself."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False, initializer_range=0.12,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def make_adapter(directory: Path) -> None:
    """An adapter of rank 8 on queries and values, large enough to change what is said."""
    directory.mkdir()
    shapes = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    tensors = {}
    for layer in range(LAYERS):
        for name, width in shapes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(RANK, HIDDEN) * 0.5).to(torch.bfloat16)
            tensors[f"{key}.lora_B.weight"] = (torch.randn(width, RANK) * 0.5).to(torch.bfloat16)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "lora_dropout": 0.0,
             "bias": "none", "target_modules": list(shapes), "base_model_name_or_path": "tiny"}
        )
    )  # fmt: skip


def main() -> None:
    """Everything, always the same."""
    torch.manual_seed(0)
    directory = Path(sys.argv[1])
    make_tokenizer(directory / "tiny")
    make_model(directory / "tiny")
    make_adapter(directory / "lora")


if __name__ == "__main__":
    main()
