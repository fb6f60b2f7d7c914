"""Where the parts meet: a config becomes a model, a model with a tokenizer a `TextModel`; to disk and back.

model = build(cfg, seed=0)           a torch module with fresh weights
lm = load("runs/demo")               a saved model with its tokenizer
lm.generate("The with statement").text
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from qkv.checkpoint import huggingface, native
from qkv.checkpoint.pull import PACKAGES, pulled
from qkv.checkpoint.source import Source, read_source
from qkv.config import Learned, ModelConfig
from qkv.config.presets import preset
from qkv.errors import CheckpointError, GenerationError
from qkv.generate import Generation, continuation
from qkv.nn import Output, Transformer, initialise
from qkv.text import Tokenizer, tokenizer_from
from qkv.text.folder import write_folder as write_tokenizer
from qkv.text.pieces import PieceTokenizer


def build(
    config: ModelConfig | str,
    seed: int = 0,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """A model with fresh weights, from a config or the name of a preset.

    The same seed gives the same weights on every machine. The model comes in evaluation mode, so that a forward pass is
    deterministic; call `.train()` before training if the config has dropout.
    """
    config = preset(config) if isinstance(config, str) else config
    model = _skeleton(config).to(dtype).to_empty(device=device or "cpu")
    initialise(model, config, seed)
    return model.eval()


def save(model: Transformer, folder: str | PathLike[str], tokenizer: Tokenizer | None = None) -> None:
    """Write `model` as a folder that `load` reads; an older save there is replaced, anything else is refused."""
    native.write(Path(folder), model.config, _arrays(model), None if tokenizer is None else tokenizer.to_dict())


def load(
    path: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> TextModel:
    """A saved model of any format that `qkv.checkpoint.source` names, in evaluation mode.

    Weights are mapped from disk, and read when they are first used. They keep the file's type unless `dtype` says
    another: on a CPU a bfloat16 file runs several times faster as float32.
    """
    path = _located(path)
    source = read_source(path)
    model = _skeleton(source.config)
    tensors = {name: _tensor(array) for name, array in source.tensors.items()}
    if dtype is None and len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtype = torch.float32  # files that mix types (GGUF) run in the widest
    model.load_state_dict(tensors, assign=True)
    tokenizer = _tokenizer_of(source, path)
    if tokenizer is not None and tokenizer.vocab_size > source.config.vocab_size:
        raise CheckpointError(
            f"{path}: its tokenizer has {tokenizer.vocab_size} tokens, its table {source.config.vocab_size} rows; "
            "they do not belong together"
        )
    return TextModel(model.to(device=device, dtype=dtype).eval(), tokenizer, source.family)


def _located(path: str | PathLike[str]) -> Path:
    """A path as it is, or the place of a pulled model of that name."""
    if not Path(path).exists():
        found = pulled(str(path))
        if found is not None:
            return found
        if str(path) in PACKAGES:
            raise CheckpointError(f"{path}: not here yet; run `qkv pull {path}` first")
    return Path(path)


def _tokenizer_of(source: Source, path: Path) -> Tokenizer | None:
    """The tokenizer that lies with a model, if one does."""
    if source.tokenizer is not None:
        return tokenizer_from(source.tokenizer)
    if source.format == "gguf":
        from qkv.text import gguf

        return gguf.from_metadata(source.metadata, str(path)) if "tokenizer.ggml.model" in source.metadata else None
    if source.format == "llama2c":
        from qkv.text import llama2c

        beside = path.with_name("tokenizer.bin")
        return llama2c.read(beside) if beside.is_file() else None
    if source.format in ("hf", "meta"):
        from qkv.text.folder import has_tokenizer, read_folder

        return read_folder(path) if has_tokenizer(path) else None
    return None


class TextModel:
    """A model together with its tokenizer."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None = None, family: str | None = None) -> None:
        self.model, self.tokenizer, self.family = model, tokenizer, family

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    def generate(self, prompt: str, max_new_tokens: int = 64, *, temperature: float = 0.8, seed: int = 0) -> Generation:
        """Continue `prompt`. Temperature 0 takes the likeliest token each time; else the seed fixes the draws."""
        tokens = list(self._tokens(prompt, max_new_tokens, temperature, seed))
        stopped = bool(tokens) and tokens[-1] in self._ends
        return Generation("".join(self._text(tokens)), tokens, "stop" if stopped else "length")

    def stream(
        self, prompt: str, max_new_tokens: int = 64, *, temperature: float = 0.8, seed: int = 0
    ) -> Iterator[str]:
        """The text of `generate`, piece by piece as it is generated."""
        return self._text(self._tokens(prompt, max_new_tokens, temperature, seed))

    def _text(self, tokens: Iterable[int]) -> Iterator[str]:
        """New tokens as text that follows the prompt: a space in front of them stays."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, PieceTokenizer):
            return tokenizer.stream(tokens, continues=True)
        return tokenizer.stream(tokens)

    @property
    def _ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self._tokenizer.specials.ends if isinstance(self._tokenizer, PieceTokenizer) else frozenset()

    def save(self, path: str | PathLike[str], format: Literal["qkv", "hf", "gguf"] = "qkv") -> None:
        """Write the model: a qkv folder with its tokenizer, a Hugging Face folder, or a GGUF file (float32)."""
        if format == "qkv":
            save(self.model, path, self.tokenizer)
        elif format == "hf":
            huggingface.write_folder(Path(path), self.config, _arrays(self.model), self.family)
            if self.tokenizer is not None and not write_tokenizer(Path(path), self.tokenizer):
                self._warn_of_tokenizer(path)
        elif format == "gguf":
            from qkv.checkpoint.gguf import write_gguf

            if Path(path).exists():  # the tensors may be mapped from it
                raise CheckpointError(f"{path}: exists already; choose another file to save into")
            write_gguf(Path(path), self.config, _arrays(self.model))
            self._warn_of_tokenizer(path)
        else:
            raise CheckpointError(f"format: {format!r} is not written; choose qkv, hf or gguf")

    def _warn_of_tokenizer(self, path: str | PathLike[str]) -> None:
        warnings.warn(f"{path}: written without its tokenizer, which this format cannot take from here", stacklevel=3)

    def score(self, text: str) -> float:
        """The mean negative log-likelihood of the text's tokens after the first, in nats; exp of it is perplexity."""
        tokens = self._ids(text)
        if self.config.head.reads != "past" or len(tokens) < 2:
            raise GenerationError("score: needs a decoder with a language-model head, and a text of two tokens or more")
        logits = self._forward([tokens]).logits
        assert logits is not None
        return float(F.cross_entropy(logits[0, :-1].float(), torch.tensor(tokens[1:], device=logits.device)))

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """One vector of length 1 per text: the mean of its tokens' hidden states (Reimers 2019). (len(texts), D)."""
        rows = [self._ids(text) for text in texts]
        empty = next((number for number, row in enumerate(rows, start=1) if not row), None)
        if not rows or empty is not None:
            raise GenerationError(f"embed: text {empty or 1} has no tokens; give texts that are not empty")
        if len(self.config.stacks) == 2:
            raise GenerationError("embed: needs a model with one stack, and this one has an encoder and a decoder")
        valid = torch.tensor([[i < len(row) for i in range(max(map(len, rows)))] for row in rows])
        hidden = self._forward(rows, valid).hidden.float().cpu()
        mean = (hidden * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        vectors: npt.NDArray[np.float32] = F.normalize(mean, dim=-1).numpy()
        return vectors

    def fill(self, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
        """For each mask token in `text`, the `top` likeliest tokens and their probabilities."""
        tokenizer = self._tokenizer
        mask = tokenizer.specials.mask if isinstance(tokenizer, PieceTokenizer) else None
        if mask is None or self.config.head.kind != "masked-lm":
            raise GenerationError("fill: needs a model with a masked-lm head and a tokenizer with a mask token")
        assert isinstance(tokenizer, PieceTokenizer)
        tokens = tokenizer.encode(text, parse_special=True)
        places = [i for i, token in enumerate(tokens) if token == mask]
        if not places:
            raise GenerationError("fill: the text has no mask token; write it where a word is to be found")
        logits = self._forward([tokens]).logits
        assert logits is not None
        best = logits[0, places].float().softmax(-1).topk(min(top, self.config.vocab_size))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[(self._tokenizer.decode([t]), p) for t, p in zip(*row, strict=True)] for row in rows]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def _forward(self, rows: Sequence[Sequence[int]], valid: torch.Tensor | None = None) -> Output:
        device, width = next(self.model.parameters()).device, max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        with torch.inference_mode():
            output: Output = self.model(padded, valid=None if valid is None else valid.to(device))
        return output

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise GenerationError("tokenizer: this model was saved without one; give TextModel(model, tokenizer) one")
        return self.tokenizer

    def _tokens(self, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        tokens, config = self._tokenizer.encode(prompt), self.config
        if config.decoder is None or config.encoder is not None or config.head.reads != "past":
            raise GenerationError("generate: needs a decoder-only model with a language-model head")
        wanted, limit = len(tokens) + max_new_tokens, config.max_seq_len
        if isinstance(config.embedding.positions, Learned) and wanted > limit:
            raise GenerationError(
                f"max_new_tokens: {wanted} tokens with the prompt, but the model has {limit} positions"
            )
        reads_prefix = any("prefix_length" in b.attention.pattern.fields for b in config.decoder.blocks)
        device = next(self.model.parameters()).device
        prefix = torch.tensor([len(tokens)], device=device) if reads_prefix else None

        def next_logits(so_far: list[int]) -> npt.NDArray[np.floating]:
            # Without a cache every step reads the whole text again: O(T^2) steps of work, the same result.
            with torch.inference_mode():
                logits = self.model(torch.tensor([so_far], device=device), prefix_length=prefix).logits
            last: npt.NDArray[np.floating] = logits[0, -1].float().cpu().numpy()
            last[self._tokenizer.vocab_size :] = -np.inf  # rows that only pad the table spell nothing
            return last

        return continuation(next_logits, tokens, max_new_tokens, temperature=temperature, seed=seed, ends=self._ends)


def _skeleton(config: ModelConfig) -> Transformer:
    """The module tree with shapes and no memory."""
    with torch.device("meta"):
        return Transformer(config)


def _arrays(model: Transformer) -> dict[str, npt.NDArray[Any]]:
    return {name: _array(tensor) for name, tensor in model.state_dict().items()}


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """bfloat16 as its bits in uint16."""
    whole = tensor.detach().cpu().contiguous()
    array: npt.NDArray[Any] = (whole.view(torch.uint16) if whole.dtype == torch.bfloat16 else whole).numpy()
    return array


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The same memory where torch can use it."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
