"""Unmodified models of transformers: all matrices wait, and gradients equal those of a whole backward bit by bit."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_parallel.pipeline.weight_grad import backward_inputs

TOKENS = torch.arange(16).reshape(2, 8) % 13
SMALL = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1)),
    "BERT": lambda: BertForMaskedLM(BertConfig(**SMALL, **NO_DROPOUT)),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_matrices_of_a_model_wait(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    weights = backward_inputs([model(input_ids=TOKENS, labels=TOKENS).loss], [None])
    matrices = {name for name, p in model.named_parameters() if p.dim() == 2 and name in theirs}
    assert {name for name, p in model.named_parameters() if p.grad is None and name in theirs} == matrices
    weights.run()
    assert all(torch.equal(p.grad, theirs[name]) for name, p in model.named_parameters() if name in theirs)
