"""A model small enough to train in seconds, whose loss tells layers that differ: BERT-like or GPT-like."""
import torch
from torch import nn


class Curve:
    """A small model whose layers are here, or on the daemon; tokens of a chain in which each has two likely next ones."""

    TOKENS, LENGTH, BATCH = 48, 24, 8

    def __init__(self, causal, seed):
        torch.manual_seed(seed)
        self.causal = causal
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, activation="gelu", batch_first=True, norm_first=causal)
        stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for inner in stack.layers:
            for tensor in inner.parameters():
                if tensor.dim() > 1:
                    nn.init.xavier_uniform_(tensor)
        self.model = nn.ModuleDict({"embedding": nn.Embedding(self.TOKENS + 1, 32),
                                    "position": nn.Embedding(self.LENGTH, 32), "stack": stack,
                                    "head": nn.Linear(32, self.TOKENS)})
        self.next = torch.randint(self.TOKENS, (self.TOKENS, 2))

    def batch(self, generator):
        rows = [torch.randint(self.TOKENS, (self.BATCH,), generator=generator)]
        for _ in range(self.LENGTH):
            which = torch.randint(2, (self.BATCH,), generator=generator)
            rows.append(self.next[rows[-1], which])
        tokens = torch.stack(rows, 1)
        if self.causal:
            return tokens[:, :-1], tokens[:, 1:], torch.ones(self.BATCH, self.LENGTH, dtype=torch.bool)
        hidden = torch.rand(self.BATCH, self.LENGTH, generator=generator) < 0.15
        hidden[:, 0] = True
        return tokens[:, 1:].masked_fill(hidden, self.TOKENS), tokens[:, 1:], hidden

    def loss(self, model, tokens, targets, counted):
        x = model["embedding"](tokens) + model["position"].weight
        mask = nn.Transformer.generate_square_subsequent_mask(self.LENGTH, device=x.device) if self.causal else None
        out = model["head"](model["stack"](x, mask=mask, is_causal=self.causal))
        return nn.functional.cross_entropy(out[counted], targets[counted])
