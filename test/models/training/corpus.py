# SPDX-License-Identifier: Apache-2.0
"""Collect the training text of this machine, train the tokenizer, write token arrays.

The text is what a Debian machine with Python 3.11 has anyway: the Python standard library with its
tests (PSF licence), the language manual inside ``pydoc_data`` (PSF), licence texts and GNU manuals (GFDL).
Files named in ``HELD_OUT`` and the tests that belong to them are never trained on.

    python -m training.corpus OUT_DIR

writes ``tokenizer.json``, ``train.npy`` and ``heldout.npy`` (uint16 tokens), ``heldout.json`` (held-out
sources) and ``manifest.json`` (what was read: files, bytes, tokens, licences, hashes).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.architecture import BOS_ID, EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE

HELD_OUT = frozenset(
    """textwrap heapq configparser graphlib statistics wave csv sched fractions queue selectors cmd
    json/decoder asyncio/queues urllib/robotparser http/cookies logging/config concurrent/futures/thread
    html/parser multiprocessing/pool importlib/util email/charset ftplib shlex""".split()
)
# Tests of held-out modules quote them: held out of the training text as well, and not used otherwise.
HELD_OUT_TESTS = frozenset(
    """textwrap heapq configparser graphlib statistics wave csv sched fractions queue selectors cmd
    robotparser http_cookies htmlparser ftplib shlex logging thread_pool""".split()
)
SKIPPED_DIRS = frozenset({"site-packages", "__pycache__", "lib-dynload"})
LONGEST_FILE = 200_000  # bytes; longer sources are mostly tables (the encodings, test data)
LICENCE_DIR = Path("/usr/share/common-licenses")
INFO_DIR = Path("/usr/share/info")
GNU_MANUALS = (
    "coreutils diffutils ed find find-maint gettext grep gzip sed time wget".split()
)  # each states the GNU Free Documentation License


@dataclass(frozen=True)
class Document:
    """One text with where it came from; ``source`` groups documents in the manifest."""

    source: str
    name: str
    text: str


def _is_held_out_test(relative: Path) -> bool:
    stem = relative.stem
    if "test" not in relative.parts or not stem.startswith("test_"):
        return False
    return stem.removeprefix("test_") in HELD_OUT_TESTS


def _is_table(text: str) -> bool:
    """Generated tables: hardly any letters, or very long lines."""
    letters = sum(map(str.isalpha, text)) / len(text)
    return letters < 0.35 or len(text) / (text.count("\n") + 1) > 200


def standard_library(root: Path) -> Iterator[Document]:
    """Sources of the standard library and its tests, tables left out, in path order."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_DIRS.intersection(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        if not 50 < path.stat().st_size <= LONGEST_FILE or _is_held_out_test(relative):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if "\ufffd" in text or _is_table(text):
            continue
        source = "standard library tests" if {"test", "tests"} & set(relative.parts) else "standard library"
        yield Document(source, relative.as_posix(), text)


def python_manual() -> Iterator[Document]:
    """The chapters of the language reference that the interactive help ships."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document("Python manual", name, topics[name])


def licence_texts() -> Iterator[Document]:
    """The licence texts that Debian keeps once for all packages (links skipped)."""
    for path in sorted(LICENCE_DIR.iterdir()):
        if path.is_file() and not path.is_symlink():
            yield Document("licence texts", path.name, path.read_text(encoding="utf-8", errors="ignore"))


def gnu_manuals() -> Iterator[Document]:
    """GNU manuals in info format; the binary tag tables at their ends are cut off."""
    for name in GNU_MANUALS:
        for path in sorted(INFO_DIR.glob(f"{name}.info*.gz")):
            text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="ignore")
            text = text.split("\x1f\nTag Table:")[0].replace("\x1f", "").replace("\x00", "")
            yield Document("GNU manuals", path.name, text)


LICENCES = {
    "standard library": "PSF-2.0",
    "standard library tests": "PSF-2.0",
    "Python manual": "PSF-2.0",
    "licence texts": "verbatim copies permitted by each text",
    "GNU manuals": "GFDL-1.3-or-later",
}


def split_held_out(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training documents (exact duplicates dropped) and held-out ones."""
    train, held, seen = [], [], set()
    for document in documents:
        if document.name.removesuffix(".py") in HELD_OUT and document.source == "standard library":
            held.append(document)
            continue
        digest = hashlib.sha256(document.text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            train.append(document)
    if len(held) != len(HELD_OUT):
        missing = HELD_OUT - {d.name.removesuffix(".py") for d in held}
        raise SystemExit(f"held-out modules not found: {sorted(missing)}")
    return train, held


def train_tokenizer(documents: list[Document]):
    """A byte-level BPE without normalisation: any byte string survives a round trip."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"tokenizer has {tokenizer.get_vocab_size()} entries, wanted {VOCAB_SIZE}")
    begin = SPECIAL_TOKENS[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, BOS_ID)])
    return tokenizer


def encode_stream(tokenizer, documents: list[Document]) -> tuple[np.ndarray, dict[str, dict[str, int]]]:
    """``<s> text </s>`` of all documents in a row, and counts for each source."""
    stream: list[int] = []
    counts: dict[str, dict[str, int]] = {}
    encodings = tokenizer.encode_batch([d.text for d in documents])
    for document, encoding in zip(documents, encodings, strict=True):
        entry = counts.setdefault(document.source, {"files": 0, "bytes": 0, "tokens": 0})
        entry["files"] += 1
        entry["bytes"] += len(document.text.encode())
        entry["tokens"] += len(encoding.ids) + 1
        stream += encoding.ids
        stream.append(EOS_ID)
    return np.array(stream, dtype=np.uint16), counts


def build(out_dir: Path) -> dict:
    """Write all files of the corpus to ``out_dir`` and return the manifest."""
    out_dir.mkdir(parents=True, exist_ok=True)
    documents = [
        *standard_library(Path(sysconfig.get_paths()["stdlib"])),
        *python_manual(),
        *licence_texts(),
        *gnu_manuals(),
    ]
    train, held = split_held_out(documents)
    tokenizer = train_tokenizer(train)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    train_tokens, counts = encode_stream(tokenizer, train)
    held_tokens, held_counts = encode_stream(tokenizer, held)
    np.save(out_dir / "train.npy", train_tokens)
    np.save(out_dir / "heldout.npy", held_tokens)
    (out_dir / "heldout.json").write_text(json.dumps({d.name: d.text for d in held}))
    for source, entry in counts.items():
        entry["licence"] = LICENCES[source]
        digest = hashlib.sha256()
        for document in train:
            if document.source == source:
                digest.update(document.text.encode())
        entry["sha256"] = digest.hexdigest()
    manifest = {
        "python": platform.python_version(),
        "train": counts,
        "train_tokens": int(train_tokens.size),
        "heldout": held_counts,
        "heldout_files": sorted(d.name for d in held),
        "gnu_manuals": sorted(d.name for d in train if d.source == "GNU manuals"),
        "licence_texts": sorted(d.name for d in train if d.source == "licence texts"),
    }
    (out_dir / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    print(json.dumps(build(parser.parse_args().out_dir), indent=1))


if __name__ == "__main__":
    main()
