"""Each listing is the seed's own code: every line of an extract is in its module, in order, and the module adds no
other.

Lines are compared as Python tokens, so that indentation, comments, docstrings, line breaks and quotes play no part.
The seed texts lie outside the repository (`QKV_DATA`, default `data/`); without them there is nothing to compare
with.
"""

import io
import tokenize
from pathlib import Path

import pytest

HERE = Path(__file__).parent
S0 = "lecture-3-architecture-and-hyperparameters.txt"
S1 = "transformer-architecture-in-detail.txt"

# module: the seed, and (first words, last words) of each extract in the order of the module
LISTINGS = {
    "s0_attention": (
        S0,
        [("Q = X @ W_Q", "V = X @ W_V"), ("def scaled_dot_product_attention", "return output")],
    ),
    "s0_multi_head": (S0, [("class MultiHeadAttention", "return self.out_proj(attn)")]),
    "s0_rope": (S0, [("def apply_rope", "return rotated")]),
    "s0_swiglu": (S0, [("class SwiGLUFFN", "return self.w2(gate * up)")]),
    "s0_norm": (
        S0,
        [
            ("x = LayerNorm(x + Attention(x))", "x = LayerNorm(x + FFN(x))"),
            ("x = x + Attention(RMSNorm(x))", "x = x + FFN(RMSNorm(x))"),
            ("class RMSNorm", "return x / rms * self.weight"),
        ],
    ),
    "s0_transformer": (S0, [("class TransformerBlock", "return logits")]),
    "s1_causal_mask": (S1, [("def create_causal_mask", "mask = create_causal_mask(5)")]),
    "s1_sqrt_dk": (
        S1,
        [
            ("def softmax(x, axis=-1):", "return e_x / np.sum(e_x, axis=axis, keepdims=True)"),
            ("d_k = 64", "scores_raw = Q @ K.T"),
            ("attn_raw = softmax(scores_raw)", "attn_scaled = softmax(scores_scaled)"),
        ],
    ),
    "s1_self_attention": (S1, [("def self_attention", "output, weights = self_attention(embeddings, d_k=8)")]),
    "s1_multi_head": (S1, [("class MultiHeadAttention:\ndef __init__(self, d_model=512", "total_params += n")]),
    "s1_sinusoidal": (S1, [("def get_sinusoidal_positional_encoding", "dot2 = pe[5] @ pe[5+k]")]),
    "s1_rope_pairs": (S1, [("x_rotated = x.clone()", "x_rotated[2*i+1] = x[2*i] * sin_val + x[2*i+1] * cos_val")]),
    "s1_rope_torch": (S1, [("class RotaryEmbedding", "q_rope, k_rope = apply_rotary_pos_emb(q, k, cos, sin)")]),
    "s1_feed_forward": (
        S1,
        [("class FeedForward:\ndef __init__(self, d_model", "ffn.W1.size + ffn.W2.size + ffn.b1.size + ffn.b2.size")],
    ),
    "s1_layer_norm": (
        S1,
        [("class LayerNorm:\ndef __init__(self, d_model", "with_residual = add_and_norm(x, sublayer_out, ln)")],
    ),
    "s1_mini_gpt": (
        S1,
        [
            ("VOCAB_SIZE = 100", "return logits"),
            ("total = 0\nfor attr in dir(model)", 'print(f"MiniGPT 总参数量'),
            ("np.random.seed(42)\nmodel = MiniGPT()", "model = MiniGPT()"),
            ("input_ids = np.random.randint", "next_token = np.argmax(next_token_logits, axis=-1)"),
        ],
    ),
}

# what a module may add: imports, the name given to a demonstration, and the value it returns
ADDED = ("import ", "from ", "def demo ", "def project ", "def post_norm ", "def pre_norm ", "def rotate ", "return ")
ADDED += ("def count_as_the_seed ",)


def logical_lines(code: str) -> list[str]:
    """The statements of some Python text as token strings, without layout, comments, docstrings and trailing commas."""
    lines: list[list[str]] = [[]]
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        if token.type == tokenize.NEWLINE:
            lines.append([])
        else:
            lines[-1].append(normal(token))
    return [text for line in lines if line and not is_docstring(line) for text in split_body(line)]


def normal(token: tokenize.TokenInfo) -> str:
    if token.type != tokenize.STRING:
        return token.string
    if '"""' in token.string:
        return "DOCSTRING"
    words = token.string.strip("'\"")
    return "MESSAGE" if " " in words else f"'{words}'"  # a sentence is translated like a comment


def is_docstring(line: list[str]) -> bool:
    return line == ["DOCSTRING"]


def split_body(line: list[str]) -> list[str]:
    """`if c: statement` on one line and on two are the same."""
    text = " ".join(line)
    for closing in (")", "]"):
        text = text.replace(f" , {closing}", f" {closing}")
    head, colon, body = text.partition(" : total")
    return [f"{head} :", f"total{body}"] if colon and head.startswith("if ") else [text]


def extract(text: str, first: str, last: str) -> str:
    start = text.index(first)
    end = text.index(last, start) + len(last)
    line = text[start:end]
    rest = text[end:].split("\n", 1)[0]  # the seed's last line may go on with code, or with prose glued to it
    return line + rest if rest.isascii() else line


def seed_lines(code: str) -> list[str]:
    return [line for line in logical_lines(code) if not line.startswith(("print (", "import "))]


@pytest.fixture
def seeds(data: Path) -> Path:
    if not (data / "seeds").is_dir():
        pytest.skip(f"no seed texts at {data / 'seeds'}")
    return data / "seeds"


@pytest.mark.data
@pytest.mark.parametrize("name", LISTINGS)
def test_listing_is_the_seeds_code(name: str, seeds: Path):
    seed, extracts = LISTINGS[name]
    text = (seeds / seed).read_text(encoding="utf-8")
    ours = logical_lines((HERE / "listings" / f"{name}.py").read_text(encoding="utf-8"))
    place, matched = 0, set()
    for first, last in extracts:
        for line in seed_lines(extract(text, first, last)):
            assert line in ours[place:], f"{name}: the seed's line is missing or out of order: {line}"
            place = ours.index(line, place) + 1
            matched.add(place - 1)
    added = [line for number, line in enumerate(ours) if number not in matched]
    assert [line for line in added if not line.startswith(ADDED)] == []


def test_every_listing_is_in_the_table():
    modules = {path.stem for path in (HERE / "listings").glob("s*.py")}
    assert modules == set(LISTINGS)
