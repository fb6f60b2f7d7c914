"""BERT (Devlin et al. 2018, arXiv 1810.04805) and the encoders that change one thing in it.

Post-norm layers with biases everywhere, exact GELU, learned positions, token types, a norm after the embedding.
"""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.embedding import Embedding
from qkv.config.ffn import Activation, Dense
from qkv.config.head import Head, MaskedLanguageModel, Pooler
from qkv.config.init import BertInit
from qkv.config.model import ModelConfig
from qkv.config.norm import LayerNorm
from qkv.config.pattern import Bidirectional, BigBird, Longformer, Pattern
from qkv.config.position import Learned, NoPositions, Positions, Rotary
from qkv.config.residual import PostNorm

EVERYBODY, NOWHERE = Bidirectional(), NoPositions()


def heads(
    n_heads: int,
    *,
    head_dim: int = 64,
    pattern: Pattern = EVERYBODY,
    positions: Positions = NOWHERE,
    global_projections: bool = False,
) -> MultiHead:
    """BERT's attention: all projections have biases, and a tenth of the weights is dropped in training."""
    return MultiHead(
        n_heads=n_heads,
        head_dim=head_dim,
        pattern=pattern,
        positions=positions,
        qkv_bias=True,
        o_bias=True,
        global_projections=global_projections,
        dropout=0.1,
    )


def embedding(positions: Positions, *, n_segments: int = 2, eps: float = 1e-12) -> Embedding:
    """norm(token + position + segment)."""
    return Embedding(positions=positions, n_segments=n_segments, norm=LayerNorm(eps=eps), dropout=0.1)


BERT_EMBEDDING, POOLER = embedding(Learned()), Pooler()


def encoder(n_layers: int, attention: MultiHead, *, activation: Activation = "gelu", eps: float = 1e-12) -> Stack:
    """Post-norm layers whose width is that of all heads, with a feed-forward network four times as wide."""
    block = Block(
        attention=attention,
        ffn=Dense(d_ff=4 * attention.n_heads * attention.head_dim, activation=activation, bias=True),
        norm=LayerNorm(eps=eps),
        residual=PostNorm(),
        dropout=0.1,
    )
    return Stack(n_layers=n_layers, layers=(block,))


def model(
    d_model: int,
    stack: Stack,
    *,
    vocab_size: int = 30_522,
    max_seq_len: int = 512,
    embed: Embedding = BERT_EMBEDDING,
    head: Head = POOLER,
) -> ModelConfig:
    """An encoder with BERT's initialisation."""
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        embedding=embed,
        encoder=stack,
        head=head,
        init=BertInit(),
    )


def longformer_base() -> ModelConfig:
    """allenai/longformer-base-4096: RoBERTa's vocabulary of 50,265, epsilon 1e-5 and position offset 2 (4,098 rows)."""
    # Windows of 512 in all 12 layers (256 on each side); global tokens have projections of their own (section 3.1 of
    # Beltagy et al. 2020, arXiv 2004.05150).
    attention = heads(12, pattern=Longformer(window=512), global_projections=True)
    embed = embedding(Learned(offset=2), n_segments=1, eps=1e-5)
    return model(768, encoder(12, attention, eps=1e-5), vocab_size=50_265, max_seq_len=4096, embed=embed)


def bigbird_base() -> ModelConfig:
    """google/bigbird-roberta-base: blocks of 64 with 3 random ones (Zaheer et al. 2020, arXiv 2007.14062)."""
    # The released code draws other random blocks, anew for every layer and head: the graph is of the same kind, not the
    # same. Its GELU is the tanh form (`gelu_new`), its epsilon BERT's.
    attention = heads(12, pattern=BigBird(block=64, random_blocks=3))
    return model(768, encoder(12, attention, activation="gelu-tanh"), vocab_size=50_358, max_seq_len=4096)


def roformer_base() -> ModelConfig:
    """junnyu/roformer_chinese_base (ZhuiyiTechnology's chinese_roformer_L-12_H-768_A-12), with its masked-LM head."""
    # BERT base with rotary queries and keys in place of learned positions (Su et al. 2021, arXiv 2104.09864). Elements
    # 2i and 2i + 1 form a pair, as in the paper; values are not turned (`rotary_value` is false). Its parameters:
    # 50,000 * 768 + 2 * 768 + 2 * 768 embedding and norm, 12 * 7,087,872 layers, 642,128 head = 124,099,664.
    attention = heads(12, positions=Rotary(layout="pairs"))
    return model(
        768,
        encoder(12, attention),
        vocab_size=50_000,
        max_seq_len=1536,
        embed=embedding(NOWHERE),
        head=MaskedLanguageModel(tied=True, activation="gelu", norm=LayerNorm(eps=1e-12)),
    )


# Sizes: BERT's section 3; vocabularies, epsilon and dropout: the released bert_config.json files. MiniLM is
# sentence-transformers/all-MiniLM-L6-v2 (Wang et al. 2020, arXiv 2002.10957), whose sentence vector is the mean of the
# hidden states; its checkpoint, and the count of 22,713,216, still hold the pooler.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "bert-base-uncased": lambda: model(768, encoder(12, heads(12))),
    "bert-large-uncased": lambda: model(1024, encoder(24, heads(16))),
    "bert-base-cased": lambda: model(768, encoder(12, heads(12)), vocab_size=28_996),
    "minilm-l6": lambda: model(384, encoder(6, heads(12, head_dim=32))),
    "roformer-base": roformer_base,
    "longformer-base": longformer_base,
    "bigbird-base": bigbird_base,
}
