"""Small Hugging Face models of every kind, built from a configuration: random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCAB = 96
LENGTH = 8
_PLAIN: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER: dict[str, Any] = {
    **_PLAIN,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_ENCODER: dict[str, Any] = {
    **_PLAIN,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_IMAGE = 16


def text(seed: int) -> Batch:
    """Token numbers, all of them targets too, as a collate function for language models makes them."""
    ids = _tokens(seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def text_pair(seed: int) -> Batch:
    """Source and target of another length, for encoder-decoders."""
    source = _tokens(seed)
    return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": _tokens(seed + 1000, 6)}


def image(seed: int) -> Batch:
    """A picture and its class."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(3, _IMAGE, _IMAGE, generator=generator),
        "labels": torch.randint(5, (), generator=generator),
    }


def sound(seed: int) -> Batch:
    """A spectrogram and what is said in it."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(8, 16, generator=generator), "labels": _tokens(seed + 1000, 6)}


def captioned(seed: int) -> Batch:
    """A picture and its caption; every sample is told from the other ones of its batch."""
    ids = _tokens(seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": image(seed)["pixel_values"]}


def _tokens(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            **_PLAIN,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def gptj() -> nn.Module:
    return hf.GPTJForCausalLM(
        hf.GPTJConfig(
            **_PLAIN,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=32,
            rotary_dim=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def gpt_neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_ENCODER, attention_dropout=0.0, hidden_dropout=0.0))


def opt() -> nn.Module:
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            **_PLAIN,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=32,
            dropout=0.0,
            word_embed_proj_dim=32,
        )
    )


def bloom() -> nn.Module:
    return hf.BloomForCausalLM(
        hf.BloomConfig(**_PLAIN, hidden_size=32, n_layer=4, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
    )


def falcon() -> nn.Module:
    return hf.FalconForCausalLM(
        hf.FalconConfig(
            **_PLAIN,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            max_position_embeddings=32,
        )
    )


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(**_PLAIN, hidden_size=32, state_size=4, num_hidden_layers=4))


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2))


def deberta_v2() -> nn.Module:
    return hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], pooler_dropout=0.0)
    )


def modernbert() -> nn.Module:
    return hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(
            **{key: value for key, value in _ENCODER.items() if "dropout" not in key},
            cls_token_id=1,
            sep_token_id=2,
            global_attn_every_n_layers=2,
            local_attention=8,
            reference_compile=False,
        )
    )


def albert() -> nn.Module:
    return hf.AlbertForMaskedLM(hf.AlbertConfig(**_ENCODER, embedding_size=16, classifier_dropout_prob=0.0))


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=_IMAGE,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=4, num_labels=5)
    )


def swin() -> nn.Module:
    return hf.SwinForImageClassification(
        hf.SwinConfig(
            image_size=_IMAGE,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            num_labels=5,
            drop_path_rate=0.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def bart() -> nn.Module:
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            **_PLAIN,
            d_model=32,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=32,
            decoder_start_token_id=2,
            dropout=0.0,
        )
    )


def whisper() -> nn.Module:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **_PLAIN,
            d_model=32,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=16,
            decoder_start_token_id=1,
            dropout=0.0,
        )
    )


class CLIP(hf.CLIPModel):
    """CLIP with its own contrastive loss always on."""

    def forward(self, **batch: Any) -> Any:
        return super().forward(**batch, return_loss=True)


def clip() -> nn.Module:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {**tower, **_PLAIN, "max_position_embeddings": 16, "projection_dim": 16}
    return CLIP(
        hf.CLIPConfig(
            text_config=words,
            vision_config={**tower, "image_size": _IMAGE, "patch_size": 4, "projection_dim": 16},
            projection_dim=16,
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)), text),
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**_DECODER, sliding_window=4)), text),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_DECODER)), text),
    "qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=8)), text),
    "gemma2": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_DECODER, head_dim=8, sliding_window=4)), text),
    "gemma3": (lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_DECODER, head_dim=8, sliding_window=4)), text),
    "phi3": (lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_DECODER, original_max_position_embeddings=32)), text),
    "gpt2": (gpt2, text),
    "gptj": (gptj, text),
    "gpt_neox": (gpt_neox, text),
    "opt": (opt, text),
    "bloom": (bloom, text),
    "falcon": (falcon, text),
    "mamba": (mamba, text),
    "mixtral": (mixtral, text),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**_ENCODER)), text),
    "roberta": (lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**_ENCODER)), text),
    "deberta_v2": (deberta_v2, text),
    "modernbert": (modernbert, text),
    "albert": (albert, text),
    "vit": (vit, image),
    "convnext": (convnext, image),
    "swin": (swin, image),
    "t5": (t5, text_pair),
    "bart": (bart, text_pair),
    "whisper": (whisper, sound),
    "clip": (clip, captioned),
}
