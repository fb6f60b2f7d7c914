"""Seed 1, "A mini Transformer in NumPy from nothing": the whole decoder-only model, its parameter counter, one greedy
step.

Sound code. Errata: E29 (the counter misses the final LayerNorm: it says 112,640 where there are 112,768; the block
never passes an encoder output; the head is a matrix of its own, not tied; nothing here trains), E30 (-1e9 is -inf in
float16; a row masked altogether gets uniform weights in float32, its unmasked ones in float64), E18 (0.02 is GPT-2's
constant, not "a reduced Xavier").
"""

import numpy as np

VOCAB_SIZE = 100
D_MODEL = 64
NUM_HEADS = 4
NUM_LAYERS = 2
SEQ_LEN = 16
D_FF = 256


class MultiHeadAttention:
    # With encoder_output: cross-attention; without: self-attention
    def __init__(self):
        d_k = D_MODEL // NUM_HEADS  # noqa: F841 -- unused in the seed too
        self.W_Q = np.random.randn(D_MODEL, D_MODEL) * 0.02
        self.W_K = np.random.randn(D_MODEL, D_MODEL) * 0.02
        self.W_V = np.random.randn(D_MODEL, D_MODEL) * 0.02
        self.W_O = np.random.randn(D_MODEL, D_MODEL) * 0.02

    def forward(self, x, encoder_output=None, causal_mask=None):
        # Q from x; K and V from encoder_output if there is one, else from x
        kv_source = encoder_output if encoder_output is not None else x
        Q = x @ self.W_Q  # (batch, seq, d_model)
        K = kv_source @ self.W_K
        V = kv_source @ self.W_V
        # heads: (batch, seq, d_model) -> (batch, heads, seq, d_k)
        batch, seq_q, _ = Q.shape
        batch, seq_k, _ = K.shape
        Q = Q.reshape(batch, seq_q, NUM_HEADS, D_MODEL // NUM_HEADS).transpose(0, 2, 1, 3)
        K = K.reshape(batch, seq_k, NUM_HEADS, D_MODEL // NUM_HEADS).transpose(0, 2, 1, 3)
        V = V.reshape(batch, seq_k, NUM_HEADS, D_MODEL // NUM_HEADS).transpose(0, 2, 1, 3)
        # scaled dot-product attention
        scores = Q @ K.transpose(0, 1, 3, 2) / np.sqrt(D_MODEL // NUM_HEADS)
        if causal_mask is not None:
            scores = scores + causal_mask
        scores = scores - scores.max(axis=-1, keepdims=True)
        attn = np.exp(scores)
        attn /= attn.sum(axis=-1, keepdims=True)
        context = attn @ V
        # join the heads
        context = context.transpose(0, 2, 1, 3).reshape(batch, seq_q, D_MODEL)
        output = context @ self.W_O
        return output


class LayerNorm:
    def __init__(self):
        self.gamma = np.ones(D_MODEL)
        self.beta = np.zeros(D_MODEL)

    def forward(self, x):
        mean = x.mean(axis=-1, keepdims=True)
        var = x.var(axis=-1, keepdims=True)
        return self.gamma * (x - mean) / np.sqrt(var + 1e-6) + self.beta


class FeedForward:
    def __init__(self):
        self.W1 = np.random.randn(D_MODEL, D_FF) * 0.02
        self.W2 = np.random.randn(D_FF, D_MODEL) * 0.02

    def forward(self, x):
        return np.maximum(0, x @ self.W1) @ self.W2  # ReLU


class TransformerBlock:
    # pre-LN; the seed: "supports self-attention and cross-attention"
    def __init__(self):
        self.ln1 = LayerNorm()
        self.attn = MultiHeadAttention()
        self.ln2 = LayerNorm()
        self.ffn = FeedForward()

    def forward(self, x, causal_mask=None):
        # Sublayer 1: pre-LN, self-attention, residual
        attn_out = self.attn.forward(self.ln1.forward(x), causal_mask=causal_mask)
        x = x + attn_out
        # Sublayer 2: pre-LN, FFN, residual
        ffn_out = self.ffn.forward(self.ln2.forward(x))
        x = x + ffn_out
        return x


class MiniGPT:
    # token embedding + learned positions + N blocks + LM head
    def __init__(self):
        self.token_embed = np.random.randn(VOCAB_SIZE, D_MODEL) * 0.02
        self.pos_embed = np.random.randn(SEQ_LEN, D_MODEL) * 0.02
        self.blocks = [TransformerBlock() for _ in range(NUM_LAYERS)]
        # final LayerNorm, as in GPT-2
        self.final_ln = LayerNorm()
        # the seed: "in a real GPT the head and the token embedding share their weights"
        self.lm_head = np.random.randn(D_MODEL, VOCAB_SIZE) * 0.02

    def forward(self, token_ids):
        # token_ids: (batch, seq_len)
        batch, seq = token_ids.shape  # noqa: RUF059 -- `batch` is unused in the seed too
        # Step 1: token embedding
        x = self.token_embed[token_ids]  # (batch, seq, d_model)
        # Step 2: learned positions
        x = x + self.pos_embed[:seq]
        # Step 3: blocks
        causal_mask = np.triu(np.ones((seq, seq)), k=1) * (-1e9)
        for block in self.blocks:
            x = block.forward(x, causal_mask=causal_mask)
        # Step 4: final LayerNorm, head
        x = self.final_ln.forward(x)
        logits = x @ self.lm_head  # (batch, seq, vocab_size)
        return logits


def count_as_the_seed(model):  # noqa: PLR0912 -- the seed's loops
    total = 0
    for attr in dir(model):
        obj = getattr(model, attr)
        if isinstance(obj, np.ndarray):
            total += obj.size
    for block in model.blocks:
        for attr in dir(block):
            obj = getattr(block, attr)
            if isinstance(obj, np.ndarray):
                total += obj.size
            if isinstance(obj, MultiHeadAttention):
                for a in dir(obj):
                    o = getattr(obj, a)
                    if isinstance(o, np.ndarray):
                        total += o.size
            if isinstance(obj, FeedForward):
                for a in dir(obj):
                    o = getattr(obj, a)
                    if isinstance(o, np.ndarray):
                        total += o.size
            if isinstance(obj, LayerNorm):
                for a in dir(obj):
                    o = getattr(obj, a)
                    if isinstance(o, np.ndarray):
                        total += o.size
    return total


def demo():
    np.random.seed(42)
    model = MiniGPT()
    input_ids = np.random.randint(0, VOCAB_SIZE, (2, 8))  # batch=2, seq=8
    logits = model.forward(input_ids)
    # greedy choice of the next token
    next_token_logits = logits[:, -1, :]  # (batch, vocab_size)
    next_token = np.argmax(next_token_logits, axis=-1)
    return model, input_ids, logits, next_token
