"""Tokenizers as folders that AutoTokenizer of transformers reads: tokenizer.json, and
tokenizer_config.json, which names its special tokens.

own_tokenizer   of a run
write_of_file   of a tokenizer.json
write_of_bytes  of bytes, a token for each
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILE = "tokenizer.json"
# transformers' role -> what the known families call it, the usual one first.
_ROLES = {
    "eos_token": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>"),
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]", "<mask>"),
}


def own_tokenizer(run_dir: Path) -> str | None:
    """Return the run's copy of its data's tokenizer, or the one of the model that it has left."""
    if (run_dir / "tokenizer.json").is_file():
        return str(run_dir / "tokenizer.json")
    if (run_dir / "pretrained" / "tokenizer_config.json").is_file():
        return str(run_dir / "pretrained")
    return None


def write_of_file(source: Path, folder: Path) -> None:
    """Write a tokenizer.json without its truncation and padding, as it is trained with.

    The class is named whatever the kind of the model beside it: by that alone transformers would
    choose one, and might add tokens that the model lacks.
    """
    content = json.loads(source.read_text(encoding="utf-8"))
    content |= {"truncation": None, "padding": None}
    text = json.dumps(content, ensure_ascii=False, indent=1)
    (folder / _FILE).write_text(text + "\n", encoding="utf-8")
    vocab = content["model"].get("vocab", {})
    there = {entry["content"] for entry in content.get("added_tokens") or []}
    there |= {*vocab} if isinstance(vocab, dict) else {token for token, _ in vocab}
    by_role = {role: [name for name in names if name in there] for role, names in _ROLES.items()}
    _write_config(folder, {role: names[0] for role, names in by_role.items() if names})


def write_of_bytes(
    folder: Path, special: Mapping[str, tuple[int, str]], begins: bool = False
) -> None:
    """Write a tokenizer of bytes: the number of a token is the byte's.

    Args:
        special: role -> number and text of a token that is not a byte of UTF-8.
        begins: whether a text begins with the token of the role bos_token.
    """
    numbers = {letter: byte for byte, letter in _letters().items()}
    for number, text in special.values():
        numbers = {letter: n for letter, n in numbers.items() if n != number} | {text: number}
    added = [
        {"id": number, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, text in sorted(special.values())
    ]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False}
    by_bytes |= {"trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "post_processor": _beginning(*special["bos_token"]) if begins else None,
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": numbers, "merges": []},
    }
    (folder / _FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _write_config(folder, {role: text for role, (_, text) in special.items()})


def _write_config(folder: Path, roles: Mapping[str, str]) -> None:
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n")


def _beginning(number: int, text: str) -> dict[str, Any]:
    """Return the post-processor that puts a token before a text."""
    token = {"SpecialToken": {"id": text, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [token, *({"Sequence": {"id": name, "type_id": 0}} for name in "AB")],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
    }


def _letters() -> dict[int, str]:
    """Return byte -> the letter that stands for it in tokenizers of pairs of bytes (GPT-2's
    bytes_to_unicode): itself if it can be printed, else one from 256 on.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
