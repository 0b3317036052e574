"""Architecture numbers of well-known backbones, for use without network and without weights.

Numbers are those of each model's published ``config.json``: Dosovitskiy et al. 2021 (ViT-B/16),
Raffel et al. 2020 (T5-Base), Meta 2024 (LLaMA 3.2 1B), Liu et al. 2019 (RoBERTa), Reimers and
Gurevych (all-MiniLM-L6-v2, after Wang et al. 2020).
"""

from collections.abc import Callable

from transformers import (
    BertConfig,
    LlamaConfig,
    PretrainedConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
)


def _vit_base() -> PretrainedConfig:
    return ViTConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        image_size=224,
        patch_size=16,
        num_channels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _t5_base() -> PretrainedConfig:
    return T5Config(
        vocab_size=32128,
        d_model=768,
        d_kv=64,
        d_ff=3072,
        num_layers=12,
        num_heads=12,
        relative_attention_num_buckets=32,
    )


def _llama_1b() -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128001,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def _roberta_base() -> PretrainedConfig:
    return RobertaConfig(
        vocab_size=50265,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )


def _minilm() -> PretrainedConfig:
    return BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=512,
    )


#: Hub name to a fresh configuration.
KNOWN: dict[str, Callable[[], PretrainedConfig]] = {
    "google/vit-base-patch16-224-in21k": _vit_base,
    "google-t5/t5-base": _t5_base,
    "meta-llama/Llama-3.2-1B": _llama_1b,
    "FacebookAI/roberta-base": _roberta_base,
    "sentence-transformers/all-MiniLM-L6-v2": _minilm,
}

#: Image normalization of those that take images.
KNOWN_NORMALIZATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "google/vit-base-patch16-224-in21k": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
