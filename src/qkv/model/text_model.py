"""`TextModel`: a model together with its tokenizer, from text to text.

lm = qkv.load("smollm2-135m")
lm.generate("The capital of France is", decoding=qkv.Greedy()).text
lm.generate(["one prompt", "and another"])         each result equals the prompt alone
lm.chat([{"role": "user", "content": "Hello"}])

An encoder-decoder reads the prompt, and writes from its start token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from qkv.config import ModelConfig
from qkv.config.decoding import Beam, Decoding, Greedy, Sampling
from qkv.engine import why_not
from qkv.errors import GenerationError
from qkv.generate import (
    Event,
    Generation,
    Hypothesis,
    PrefixCache,
    Request,
    Tokens,
    Usage,
    beam_search,
    collected,
    decode,
    stop_strings,
)
from qkv.generate.constrain import Factory
from qkv.generate.runners.native import NativeRunner
from qkv.generate.runners.torch import Runtime, TorchRunner
from qkv.generate.speculative import DraftModel, Lookup, Speculation
from qkv.model.saving import Origin, save_as
from qkv.nn import Output, Transformer
from qkv.text import Tokenizer
from qkv.text.chat import Message, encode_chat, turn_ends
from qkv.text.pieces import PieceTokenizer

DEFAULT = Sampling(temperature=0.8)


class TextModel:
    """A model, its tokenizer, and how it is run."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        family: str | None = None,
        runtime: Runtime | None = None,
        token_ids: Mapping[str, Any] | None = None,
    ) -> None:
        """`family` and `token_ids` are what a saved model's files called it, and its control tokens."""
        self.model, self.tokenizer, self.family, self.token_ids = model, tokenizer, family, token_ids
        self.runtime = Runtime() if runtime is None else runtime
        self.usage = Usage()
        """What the last generation took."""

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    @property
    def runtime(self) -> Runtime:
        """How the model is run; a new one begins with an empty prefix cache."""
        return self._runtime

    @runtime.setter
    def runtime(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._runner: TorchRunner | NativeRunner | None = None
        self._prefixes: PrefixCache | None = None

    @overload
    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        *,
        decoding: Decoding = DEFAULT,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        constraint: Factory | None = None,
        draft: TextModel | Speculation | Literal["lookup"] | None = None,
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: list[str],
        max_new_tokens: int = 64,
        *,
        decoding: Decoding = DEFAULT,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        constraint: Factory | None = None,
        draft: TextModel | Speculation | Literal["lookup"] | None = None,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: str | list[str],
        max_new_tokens: int = 64,
        *,
        decoding: Decoding = DEFAULT,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        constraint: Factory | None = None,
        draft: TextModel | Speculation | Literal["lookup"] | None = None,
    ) -> Generation | list[Generation]:
        """Continue a prompt, or each of several at once: every result is the prompt's alone.

        stop: strings that end the text; include_stop: whether they are part of it.
        constraint: what the text must satisfy (`qkv.generate.json_schema`, `regex`).
        draft: a smaller model with the same tokens, or "lookup": what followed the last tokens when they stood in the
        text before. It changes the speed; greedy tokens stay the same, sampled ones keep their distribution.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        read = [self._read(text) for text in prompts]
        if isinstance(decoding, Beam):
            if stop or draft is not None:
                raise GenerationError("decoding: Beam takes no stop strings and no draft; leave them out")
            done = [self._best(tokens, source, max_new_tokens, decoding, constraint) for tokens, source in read]
        else:
            asked = self._asked(max_new_tokens, decoding, stop, include_stop, constraint)
            done = collected(self._events(read, [asked] * len(read), draft), len(read))
        return done[0] if isinstance(prompt, str) else done

    def samples(
        self,
        prompt: str,
        n: int,
        max_new_tokens: int = 64,
        *,
        decoding: Sampling = DEFAULT,
        stop: str | Sequence[str] = (),
        constraint: Factory | None = None,
    ) -> list[Generation]:
        """`n` continuations of one prompt, which is read once; the first is that of `generate`."""
        asked = self._asked(max_new_tokens, decoding, stop, False, constraint)
        requests = [replace(asked, sample=sample) for sample in range(n)]
        return collected(self._events([self._read(prompt)] * n, requests, None), n)

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        *,
        decoding: Decoding = DEFAULT,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        constraint: Factory | None = None,
        draft: TextModel | Speculation | Literal["lookup"] | None = None,
    ) -> Iterator[str]:
        """The text of `generate`, piece by piece as it is generated: whole characters, and no part of a stop string."""
        asked = self._asked(max_new_tokens, decoding, stop, include_stop, constraint)
        return _texts(self._events([self._read(prompt)], [asked], draft))

    def chat(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = 512,
        *,
        decoding: Decoding = DEFAULT,
        stop: str | Sequence[str] = (),
        constraint: Factory | None = None,
    ) -> Generation:
        """The model's answer to a conversation, written as its chat template says. `messages`: role and content each.

        With a prefix cache (`Runtime.prefix_bytes`), what an earlier turn has read is not read again.
        """
        asked = self._asked(max_new_tokens, decoding, stop, False, constraint)
        return collected(self._events([self._spoken(messages)], [asked], None, self._turn_ends), 1)[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        max_new_tokens: int = 512,
        *,
        decoding: Decoding = DEFAULT,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """The text of `chat`, piece by piece."""
        asked = self._asked(max_new_tokens, decoding, stop, False, None)
        return _texts(self._events([self._spoken(messages)], [asked], None, self._turn_ends))

    def beams(
        self, prompt: str, beam: Beam, max_new_tokens: int = 64, *, constraint: Factory | None = None
    ) -> list[tuple[str, Hypothesis]]:
        """The texts that a beam search found, the best first, with their tokens and scores."""
        tokens, source = self._read(prompt)
        found = self._search(tokens, source, max_new_tokens, beam, constraint)
        return [(self._written(one.tokens), one) for one in found]

    def _search(
        self, tokens: Tokens, source: Tokens | None, max_new_tokens: int, beam: Beam, constraint: Factory | None
    ) -> list[Hypothesis]:
        return beam_search(
            self.runner,
            tokens,
            beam,
            max_new_tokens=max_new_tokens,
            ends=self._ends,
            source=source,
            constraint=None if constraint is None else constraint(),
        )

    def _best(
        self, tokens: Tokens, source: Tokens | None, max_new_tokens: int, beam: Beam, constraint: Factory | None
    ) -> Generation:
        best = self._search(tokens, source, max_new_tokens, beam, constraint)[0]
        ended = best.finished and best.tokens[-1] in self._ends
        return Generation(
            self._written(best.tokens),
            list(best.tokens),
            "stop" if best.finished else "length",
            stop=best.tokens[-1] if ended else None,
        )

    @property
    def runner(self) -> TorchRunner | NativeRunner:
        """The model as generation runs it."""
        if self._runner is None:
            spelled = self.config.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
            native = self._is_native()
            self._runner = self._native(spelled) if native else TorchRunner(self.model, spelled, self.runtime)
        return self._runner

    def _is_native(self) -> bool:
        """Whether the native engine runs it; why not is said once, where the choice was left open."""
        if self.runtime.engine != "auto":
            return self.runtime.engine == "native"
        reason = why_not(self.config)
        if reason is not None:
            warnings.warn(f"engine: torch runs this model, since of the native one it holds: {reason}", stacklevel=3)
        return reason is None

    def _native(self, spelled: int) -> NativeRunner:
        runtime = self.runtime
        if runtime.codec != "raw" or runtime.layout != "auto":
            raise GenerationError("engine: the native one keeps caches raw and not paged; leave out codec and layout")
        if runtime.deterministic is False:
            raise GenerationError("deterministic: the native engine always is, at no cost; leave it out")
        weights = {name: tensor.float().cpu().numpy() for name, tensor in self.model.state_dict().items()}
        form, threads = runtime.quantize or "fp32", runtime.threads
        return NativeRunner.of(self.config, weights, spelled, form, threads=threads, chunk=runtime.chunk)

    def _events(
        self,
        read: Sequence[tuple[Tokens, Tokens | None]],
        asked: Sequence[_Asked],
        draft: TextModel | Speculation | Literal["lookup"] | None,
        ends: frozenset[int] | None = None,
    ) -> Iterator[Event]:
        """Tokens and texts as they come."""
        self.usage = Usage()
        ends = self._ends if ends is None else ends
        requests = [one.request(tokens, ends) for one, (tokens, _) in zip(asked, read, strict=True)]
        sources = [source for _, source in read if source is not None]
        return decode(
            self.runner,
            requests,
            sources=sources or None,
            spell=None if self.tokenizer is None else self._text,
            speculative=self._speculation(draft),
            prefix_cache=self._prefix_cache(),
            usage=self.usage,
        )

    def _asked(
        self,
        max_new_tokens: int,
        decoding: Decoding,
        stop: str | Sequence[str],
        include_stop: bool,
        constraint: Factory | None,
    ) -> _Asked:
        if not isinstance(decoding, Greedy | Sampling):
            raise GenerationError(f"decoding: expected Greedy or Sampling here, got {decoding!r}; generate takes Beam")
        return _Asked(max_new_tokens, decoding, stop_strings(stop), include_stop, constraint)

    def _speculation(self, draft: TextModel | Speculation | Literal["lookup"] | None) -> Speculation | None:
        if draft == "lookup":
            return Lookup()
        if isinstance(draft, str):
            raise GenerationError(f'draft: {draft!r}: choose "lookup", or give a smaller model')
        if isinstance(draft, TextModel):
            if draft.config.vocab_size != self.config.vocab_size:
                raise GenerationError(
                    f"draft: a vocabulary of {draft.config.vocab_size} tokens, but the model's has "
                    f"{self.config.vocab_size}; choose a model with the same tokenizer"
                )
            return DraftModel(draft.runner)
        return draft

    def _prefix_cache(self) -> PrefixCache | None:
        """None where it is off, or where a prompt is read both ways, so that nothing of it can be reused."""
        if not self.runtime.prefix_bytes or self.runner.reads_prefix:
            return None
        if self._prefixes is None:
            self._prefixes = PrefixCache(self.runner, self.runtime.prefix_bytes)
        return self._prefixes

    def _read(self, prompt: str) -> tuple[list[int], list[int] | None]:
        """The tokens that the decoder continues, and those that an encoder reads."""
        tokens = self._ids(prompt)
        if self.model.encoder is None or self.model.decoder is None:
            return tokens, None
        tokenizer = self._tokenizer
        starts = tokenizer.specials.starts if isinstance(tokenizer, PieceTokenizer) else ()
        if not starts:
            raise GenerationError(
                "generate: this encoder-decoder's tokenizer names no token that its decoder starts with"
            )
        return list(starts), tokens

    def _spoken(self, messages: Sequence[Message]) -> tuple[list[int], None]:
        return encode_chat(self._chatting, messages), None

    @property
    def _turn_ends(self) -> frozenset[int]:
        """The tokens with which an answer is over."""
        return self._ends | turn_ends(self._chatting)

    @property
    def _chatting(self) -> PieceTokenizer:
        if not isinstance(self._tokenizer, PieceTokenizer):
            raise GenerationError("chat: this tokenizer has no control tokens, so it cannot write a conversation")
        return self._tokenizer

    def _text(self, tokens: Iterable[int]) -> Iterator[str]:
        """New tokens as text that follows the prompt: a space in front of them stays."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, PieceTokenizer):
            return tokenizer.stream(tokens, continues=self.model.encoder is None)
        return tokenizer.stream(tokens)

    def _written(self, tokens: Sequence[int]) -> str:
        """The text of new tokens; that of the end is not shown."""
        shown = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        return "".join(self._text(shown)) if self.tokenizer is not None else ""

    @property
    def _ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self.tokenizer.specials.ends if isinstance(self.tokenizer, PieceTokenizer) else frozenset()

    def save(self, path: str | PathLike[str], format: Literal["qkv", "hf", "gguf"] = "qkv") -> None:
        """Write the model: a qkv folder with its tokenizer, a Hugging Face folder, or a GGUF file (float32)."""
        save_as(Path(path), format, self.model, Origin(self.tokenizer, self.family, self.token_ids or {}))

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


@dataclass(frozen=True)
class _Asked:
    """What is asked for, whatever the prompt."""

    max_new_tokens: int
    decoding: Greedy | Sampling
    stop: tuple[str, ...]
    include_stop: bool
    constraint: Factory | None
    sample: int = 0

    def request(self, prompt: Tokens, ends: frozenset[int]) -> Request:
        """It, of this prompt."""
        constraint = None if self.constraint is None else self.constraint()
        return Request(
            prompt, self.max_new_tokens, self.decoding, ends, self.stop, self.include_stop, self.sample, constraint
        )


def _texts(events: Iterator[Event]) -> Iterator[str]:
    return (event.text for event in events if event.text)
