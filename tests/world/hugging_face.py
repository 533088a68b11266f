"""Programs around models of transformers, small ones that are not downloaded."""

from __future__ import annotations

import torch

from tests.world.script import Script, Update, program


def fine_tuning(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return Script(model, [Update(lambda model, **inputs: model(**inputs).loss, optimizer, clip=1.0)], batch)


@program(needs="transformers")
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=29, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=16, max_target_positions=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0, use_cache=False,
        suppress_tokens=[], begin_suppress_tokens=[]))
    return fine_tuning(model, lambda step, carried: {"input_features": torch.randn(2, 8, 32),
                                                     "labels": torch.randint(3, 29, (2, 7))})


@program(needs="transformers")
def vision_transformer():
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=12, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    return fine_tuning(model, lambda step, carried: {"pixel_values": torch.randn(4, 3, 12, 12), "labels": torch.randint(5, (4,))})


@program(needs="transformers")
def hidden_states_of_a_teacher():
    """Distillation by hidden states, which models of transformers 5 gather by hooks, put on at the first call behind a lock."""
    from transformers import BertConfig, BertModel

    def bert():
        return BertModel(BertConfig(vocab_size=29, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                    num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))

    model, teacher = bert(), bert().requires_grad_(False).eval()

    def objective(model, ids):
        pairs = zip(model(ids, output_hidden_states=True).hidden_states, teacher(ids, output_hidden_states=True).hidden_states)
        return sum((ours.float() - theirs).square().mean() for ours, theirs in pairs)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return Script(model, [Update(objective, optimizer)], lambda step, carried: (torch.randint(29, (2, 8)),))


@program(needs="transformers")
def router_logits():
    """A mixture of experts whose loss balances them by the logits of its routers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=29, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=2, num_experts_per_tok=1, output_router_logits=True, use_cache=False))

    def batch(step, carried):
        ids = torch.randint(29, (2, 8))
        return {"input_ids": ids, "labels": ids}

    return fine_tuning(model, batch)
