"""The layers of the decoder, in plain torch.

Shape suffixes: B batch, S sequence, T tokens (B x S), D model, F feed-forward, H heads, G key-value heads, K head size
(or choices per token, where T comes first), V vocabulary, E experts, R routed tokens (T x K).
"""
