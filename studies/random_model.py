"""Write random weights of a published model's true shape, for studies of what it costs.

    python studies/random_model.py MODEL FOLDER

A random model computes the same operations as a trained one, in the same time and memory. What it
learns says nothing. The weights are in bfloat16: 2.6 GB for opt-1.3b, 1.5 GB for t5-large, 13 GB
for llama-7b.
"""

import argparse
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "word_embed_proj_dim": 2048,
    },
    "llama-7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "t5-large": {
        "model_type": "t5",
        "d_model": 1024,
        "d_ff": 4096,
        "num_layers": 24,
        "num_heads": 16,
        "vocab_size": 32128,
        "eos_token_id": 256,  # the byte tokenizer's
        "decoder_start_token_id": 0,
    },
}


def write(name: str, folder: Path, **changes: Any) -> None:
    """Write the model's weights and configuration.

    Args:
        name: a key of MODELS.
        folder: is made.
        changes: fields of the configuration, such as the number of layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(**{**MODELS[name], **changes})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    # Billions of random numbers take minutes on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        auto.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write(options.model, options.folder)
